"""An EAGLE-3 head as a layer that drafts (arXiv 2503.01840). Its KV lies in windows of its own: the
last rows of each running sequence, in memory that is neither passed on nor pooled. The attention of
a head over these windows has grouped heads as Llama's, or is MLA as the model's. Both read a row
that is twice as wide as the head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from mooncake.base import CheckpointError
from mooncake.engine.plan import StepSlot
from mooncake.model.backends import Backends
from mooncake.model.checkpoint.eagle3 import (
    EMBEDDING,
    HEAD,
    IS_DRAFTED,
    TO_TARGET,
    WINDOW,
    Eagle3Files,
    Eagle3Spec,
    GroupedHeads,
    LatentHeads,
)
from mooncake.model.checkpoint.weights import view_tensor
from mooncake.model.copies import Copies
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.layers.linear import GatedMlp, Linear
from mooncake.model.layers.rows import RmsNorm, Rope


class Weights(Protocol):
    """Gives the tensors of `self_attn` by their names, in the head's dtype and on its device."""

    def tensor(self, name: str) -> torch.Tensor: ...

    def norm(self, name: str) -> RmsNorm: ...

    def linear(self, *names: str) -> Linear:
        """Return one of several products with the same input, with outputs in this order."""
        ...


class HeadAttention(Protocol):
    """What an attention makes of the rows of a step; `joined` is [rows, 2 * hidden]."""

    rope: Rope

    def keys_values(self, joined: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Return what later rows attend to, [rows, kv_width]."""
        ...

    def attended(
        self, joined: torch.Tensor, rotation: torch.Tensor, seen: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return [rows, hidden]. seen: for each row what it attends to, [count, kv_width]."""
        ...


class GroupedAttention:
    """Implements `HeadAttention` with keys and values of groups of heads."""

    def __init__(
        self, spec: GroupedHeads, weights: Weights, backends: Backends, device: torch.device
    ) -> None:
        self._width = spec.head_dim
        self._query = weights.linear("q_proj")
        self._key_value = weights.linear("k_proj", "v_proj")
        self._output = weights.linear("o_proj")
        self.rope = Rope(spec, device, backends)

    def keys_values(self, joined: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """See `HeadAttention`: keys, then values, of all groups."""
        made = self._key_value(joined).view(len(joined), 2, -1, self._width)
        return torch.stack((self.rope(made[:, 0], rotation), made[:, 1]), dim=1).flatten(1)

    def attended(
        self, joined: torch.Tensor, rotation: torch.Tensor, seen: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """See `HeadAttention`."""
        queries = self.rope(self._query(joined).view(len(joined), -1, self._width), rotation)
        found = []
        for query, rows in zip(queries, seen, strict=True):
            keys, values = rows.view(len(rows), 2, -1, self._width).permute(1, 2, 0, 3)
            grouped = query.view(keys.shape[0], -1, self._width)
            found.append(functional.scaled_dot_product_attention(grouped, keys, values).flatten())
        return self._output(torch.stack(found))


class LatentAttention:
    """Implements `HeadAttention` with MLA in its absorbed form: rows hold the normed latent and the
    rotated key, which all heads share.
    """

    def __init__(
        self,
        spec: LatentHeads,
        num_heads: int,
        weights: Weights,
        backends: Backends,
        device: torch.device,
    ) -> None:
        self._spec, self._num_heads = spec, num_heads
        compressed = spec.q_lora_rank is not None
        self._query_a = weights.linear("q_a_proj") if compressed else None
        self._query_norm = weights.norm("q_a_layernorm") if compressed else None
        self._query = weights.linear("q_b_proj" if compressed else "q_proj")
        self._latent_key = weights.linear("kv_a_proj_with_mqa")
        self._latent_norm = weights.norm("kv_a_layernorm")
        of_heads = weights.tensor("kv_b_proj").view(num_heads, -1, spec.kv_lora_rank)
        key_up, value_up = torch.split(of_heads, [spec.qk_nope_head_dim, spec.v_head_dim], dim=1)
        self._key_up = key_up.transpose(1, 2).contiguous()
        self._value_up = value_up.contiguous()
        self._output = weights.linear("o_proj")
        self._linear_heads: Callable[..., torch.Tensor] = backends.op("linear_heads")
        self.rope = Rope(spec, device, backends)

    def keys_values(self, joined: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """See `HeadAttention`."""
        made = self._latent_key(joined)
        rank = self._spec.kv_lora_rank
        key = self.rope(made[:, None, rank:], rotation)[:, 0]
        return torch.cat((self._latent_norm(made[:, :rank].contiguous()), key), dim=-1)

    def attended(
        self, joined: torch.Tensor, rotation: torch.Tensor, seen: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """See `HeadAttention`."""
        spec = self._spec
        if self._query_a is not None and self._query_norm is not None:
            joined = self._query_norm(self._query_a(joined))
        queries = self._query(joined).view(len(joined), self._num_heads, -1)
        turned = self.rope(queries[..., spec.qk_nope_head_dim :], rotation)
        plain = queries[..., : spec.qk_nope_head_dim].contiguous()
        whole = torch.cat((self._linear_heads(plain, self._key_up), turned), dim=-1)
        found = [
            functional.scaled_dot_product_attention(
                query[None], rows[None], rows[None, :, : spec.kv_lora_rank],
                scale=spec.softmax_scale,
            )[0]
            for query, rows in zip(whole, seen, strict=True)
        ]  # fmt: skip
        values = self._linear_heads(torch.stack(found), self._value_up)
        return self._output(values.flatten(1))


@dataclass
class _Held:
    """The window of one sequence."""

    number: int
    first: int
    """The place of its first row."""
    stop: int
    """The place after its last row."""


class KvWindows:
    """One window for each sequence that may run. A row sees at least the `window` rows before it
    that were written, and at most twice as many; then older ones make room.
    """

    def __init__(
        self, num_sequences: int, window: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`width`: the numbers in a row."""
        self.window = window
        self._rows = torch.empty(num_sequences, 2 * window, width, dtype=dtype, device=device)
        self._free = list(range(num_sequences))
        self._held: dict[int, _Held] = {}

    def write(self, sequence_id: int, place: int, rows: torch.Tensor) -> None:
        """Store `rows` [count, width], at most `window` of them, at the places from `place` on.
        Rows after these are forgotten. If there is a gap, or nothing was written yet, rows before
        these are forgotten too.
        """
        held = self._held.get(sequence_id)
        if held is None:
            held = self._held[sequence_id] = _Held(self._free.pop(), place, place)
        if not held.first <= place <= held.stop:
            held.first = place
        mine, begin = self._rows[held.number], place - held.first
        assert len(rows) <= self.window, "more rows than a window takes at once"
        if begin + len(rows) > 2 * self.window:
            kept = mine[begin - self.window : begin].clone()
            mine[: self.window] = kept
            held.first, begin = place - self.window, self.window
        mine[begin : begin + len(rows)] = rows
        held.stop = place + len(rows)

    def read(self, sequence_id: int) -> torch.Tensor:
        """Return the rows of a sequence up to the last one written, [count, width]: a view."""
        held = self._held[sequence_id]
        return self._rows[held.number, : held.stop - held.first]

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Free the windows of sequences that have one."""
        for sequence_id in sequence_ids:
            held = self._held.pop(sequence_id, None)
            if held is not None:
                self._free.append(held.number)

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Raise AssertionError when a window is lost, held twice, or held by another sequence than
        these.
        """
        numbers = sorted([*self._free, *(held.number for held in self._held.values())])
        assert numbers == list(range(len(self._rows))), "a window is lost or held twice"
        others = self._held.keys() - set(sequences)
        assert not others, f"windows of sequences that have ended: {sorted(others)}"


class Eagle3Head:
    """The weights of a head, and its computation for rows; no KV.

    The input of attention is the normed embedding of a token beside the normed state before it. The
    residual carries the state on. A head without an embedding or vocabulary of its own uses the
    model's.
    """

    def __init__(self, files: Eagle3Files, model: KimiK2, backends: Backends) -> None:
        """Load the head in `files` in the dtype of `model`, onto its device.

        Raises:
            CheckpointError: its statements about its vocabulary contradict each other.
        """
        self.spec: Eagle3Spec = files.spec
        self.dtype, self.device = model.dtype, model.device
        self._files = files
        self._backends = backends
        self._model = model
        layer = "midlayer."
        self._fc_norms = [
            self.norm(f"fc_norm.{at}") for at in range(len(self.spec.layers) * self.spec.fc_norm)
        ]
        self._fc = self.linear("fc")
        self._token_norm = self.norm(layer + "input_layernorm")
        self._state_norm = self.norm(layer + "hidden_norm")
        self.attention = self._attention(layer + "self_attn.")
        self._mlp_norm = self.norm(layer + "post_attention_layernorm")
        self._mlp = GatedMlp(
            self.linear(layer + "mlp.gate_proj", layer + "mlp.up_proj"),
            self.linear(layer + "mlp.down_proj"),
            backends.op("gated"),
        )
        self._norm_out = self.norm("norm")
        self._embedding = self.tensor(EMBEDDING) if EMBEDDING in files.homes else None
        self._head = self.linear(HEAD.removesuffix(".weight")) if HEAD in files.homes else None
        self._targets = self._target_tokens()

    def states(self, read: torch.Tensor) -> torch.Tensor:
        """Return the states that the layer takes, [rows, hidden], from the model's states, which
        lie side by side.
        """
        if self._fc_norms:
            parts = read.chunk(len(self._fc_norms), dim=-1)
            read = torch.cat(
                [norm(part) for norm, part in zip(self._fc_norms, parts, strict=True)], dim=-1
            )
        return self._fc(read)

    def joined(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the input of attention, [rows, 2 * hidden], of tokens [rows] int64 and states."""
        embedded = (
            self._model.embedded(tokens)
            if self._embedding is None
            else functional.embedding(tokens, self._embedding)
        )
        return torch.cat((self._token_norm(embedded), self._state_norm(states)), dim=-1)

    def attend(
        self,
        joined: torch.Tensor,
        rotation: torch.Tensor,
        states: torch.Tensor,
        seen: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return the layer's state of each row, [rows, hidden].

        seen: for each row what it attends to, including itself, [count, kv_width].
        """
        spec = self.spec
        residual = self._state_norm(states) if spec.norm_before_residual else states
        x = residual + self.attention.attended(joined, rotation, seen)
        x = self._mlp.add(self._mlp_norm(x), x)
        return self._norm_out(x) if spec.norm_output else x

    def likeliest(self, states: torch.Tensor) -> torch.Tensor:
        """Return the likeliest token after each of the layer's states, int64 [rows]: the first
        rank's, because all ranks must compute the same tokens, and each may round differently.
        """
        normed = states if self.spec.norm_output else self._norm_out(states)
        if self._head is None:
            return self._model.likeliest(normed)
        best = self._head.wide(normed).argmax(dim=-1)
        best = self._model.stage.ranks.gather(best)[: len(best)]
        return best if self._targets is None else self._targets[best]

    def _attention(self, prefix: str) -> HeadAttention:
        named, spec = _Named(self, prefix), self.spec.attention
        if isinstance(spec, LatentHeads):
            heads = self.spec.num_attention_heads
            return LatentAttention(spec, heads, named, self._backends, self.device)
        return GroupedAttention(spec, named, self._backends, self.device)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the head, in its dtype and on its device."""
        stored = view_tensor(*self._files.homes[name])
        return stored.to(device=self.device, dtype=self.dtype, copy=True)

    def norm(self, name: str) -> RmsNorm:
        """Return a norm of the head, by the name of its module."""
        return RmsNorm(self.tensor(name + ".weight"), self.spec.rms_norm_eps, self._backends)

    def linear(self, *names: str) -> Linear:
        """Return one of several products with the same input. Their outputs are in the
        given order.
        """
        weights = [self.tensor(name + ".weight") for name in names]
        return Linear(
            weights[0] if len(weights) == 1 else torch.cat(weights),
            multiply=self._backends.linear,
            compiled=self._backends.compiled,
        )

    def _target_tokens(self) -> torch.Tensor | None:
        """Return the model's token for each drafted one, int64; None: they are the same."""
        files, spec = self._files, self.spec
        if TO_TARGET not in files.homes:
            return None
        offsets = view_tensor(*files.homes[TO_TARGET]).long()
        targets = offsets + torch.arange(spec.draft_vocab_size)
        known = bool(((targets >= 0) & (targets < spec.vocab_size)).all())
        if known and IS_DRAFTED in files.homes:
            drafted = view_tensor(*files.homes[IS_DRAFTED]).nonzero().flatten()
            known = torch.equal(targets.sort().values, drafted)
        if not known:
            raise CheckpointError(
                f"{TO_TARGET} in {files.path}: it names other tokens than {IS_DRAFTED}, or tokens "
                f"outside the model's vocabulary of {spec.vocab_size}"
            )
        return targets.to(self.device)


class _Named:
    """Implements `Weights`: the head's tensors below a prefix."""

    def __init__(self, head: Eagle3Head, prefix: str) -> None:
        self._head, self._prefix = head, prefix

    def tensor(self, name: str) -> torch.Tensor:
        return self._head.tensor(f"{self._prefix}{name}.weight")

    def norm(self, name: str) -> RmsNorm:
        return self._head.norm(self._prefix + name)

    def linear(self, *names: str) -> Linear:
        return self._head.linear(*(self._prefix + name for name in names))


class Eagle3Rows:
    """Computes rows of a head over windows of KV."""

    block_tokens = None

    def __init__(self, head: Eagle3Head, num_sequences: int, copies: Copies) -> None:
        """`num_sequences`: the most sequences that may be known at a time."""
        self._head = head
        self._copies = copies
        self.windows = KvWindows(
            num_sequences, WINDOW, head.spec.attention.kv_width, head.dtype, head.device
        )
        self.reads = head.spec.layers
        self.window = WINDOW
        self.states = head.states
        self.likeliest = head.likeliest

    def compute(self, slots: Sequence[StepSlot], states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Write the KV of the slots' tokens; see `DraftLayer`. A row's position is that of the
        state before its token, as in the training of heads.
        """
        head = self._head
        counts = [len(slot.tokens) for slot in slots]
        places = [at for slot in slots for at in range(slot.start, slot.start + len(slot.tokens))]
        positions = self._copies.send(torch.tensor(places)) - 1
        tokens = self._copies.send(torch.tensor([t for slot in slots for t in slot.tokens]))
        every, rotation = torch.cat(list(states)), head.attention.rope.rotation(positions)
        joined = head.joined(tokens, every)
        made = torch.split(head.attention.keys_values(joined, rotation), counts)
        for slot, rows in zip(slots, made, strict=True):
            self.windows.write(slot.sequence_id, slot.start, rows)
        ends = torch.tensor(counts).cumsum(0) - 1
        sampled = [index for index, slot in enumerate(slots) if slot.sample]
        if not sampled:
            return every[:0]
        last = self._copies.send(ends[sampled])
        seen = [self.windows.read(slots[index].sequence_id) for index in sampled]
        return head.attend(joined[last], rotation[last], every[last], seen)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Free the windows of sequences."""
        self.windows.forget(sequence_ids)

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Raise AssertionError when a sequence other than these has a window, or a window
        is lost.
        """
        self.windows.check_integrity(sequences)
