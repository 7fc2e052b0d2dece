"""An EAGLE-3 head as a layer that drafts (arXiv 2503.01840). Its KV lies in windows of its own: the
last rows of each running sequence, in memory that is neither passed on nor pooled. The host knows
where each row lies; the device reads it from tensors, so that captured steps can be replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from mooncake.base import CheckpointError
from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.step_log import CapturedSizes
from mooncake.model.backends import Backends
from mooncake.model.checkpoint.eagle3 import (
    AT_ONCE,
    EMBEDDING,
    HEAD,
    IS_DRAFTED,
    TO_TARGET,
    WINDOW,
    Eagle3Files,
    Eagle3Spec,
    LatentHeads,
)
from mooncake.model.checkpoint.weights import view_tensor
from mooncake.model.copies import Copies
from mooncake.model.device.graphs import GraphPort, most_rows
from mooncake.model.drafts.captured import CapturedGuesses
from mooncake.model.drafts.eagle3_attention import (
    GroupedAttention,
    HeadAttention,
    LatentAttention,
    Part,
)
from mooncake.model.drafts.model_drafts import last_rows
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.layers.linear import GatedMlp, Linear
from mooncake.model.layers.rows import RmsNorm

_TOKENS = 0


@dataclass
class _Held:
    """The window of one sequence."""

    number: int
    origin: int
    """The place whose row lies in the window's first slot."""
    first: int
    """The place of its oldest row."""
    stop: int
    """The place after its last row."""


class Seen(NamedTuple):
    """What the last of some rows sees: `num_rows` rows of window `number`, from slot `begin` on,
    around its end.
    """

    number: int
    begin: int
    num_rows: int


class KvWindows:
    """One window for each sequence that may run: a ring of slots, whose oldest rows make room for
    new ones. A row sees at least the `window` rows before it that were written, and at most twice
    as many.
    """

    def __init__(
        self, num_sequences: int, window: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`width`: the numbers in a row."""
        self.window = window
        self.slots = 2 * window
        shape = num_sequences + 1, self.slots, width
        self.rows = torch.zeros(shape, dtype=dtype, device=device)
        """The rows of each window. The last window is for rows that belong to no sequence."""
        self._free = list(range(num_sequences))
        self._held: dict[int, _Held] = {}

    def take(self, sequence_id: int, place: int, count: int) -> tuple[list[int], Seen]:
        """Make room for `count` rows, at most `window`, at the places from `place` on. Return where
        each goes among the rows of all windows, and what the last one sees. Rows after these are
        forgotten. If there is a gap, or nothing was written yet, rows before these are forgotten
        too.
        """
        assert count <= self.window, "more rows than a window takes at once"
        held = self._held.get(sequence_id)
        if held is None:
            held = self._held[sequence_id] = _Held(self._free.pop(), place, place, place)
        if not held.first <= place <= held.stop:
            held.origin = held.first = place
        held.stop = place + count
        held.first = max(held.first, held.stop - self.slots)
        base, places = held.number * self.slots, range(place, held.stop)
        begin = (held.first - held.origin) % self.slots
        seen = Seen(held.number, begin, held.stop - held.first)
        return [base + (at - held.origin) % self.slots for at in places], seen

    def write(self, targets: torch.Tensor, rows: torch.Tensor) -> None:
        """Store `rows` [rows, width] where `take` has said, int64 [rows]."""
        self.rows.flatten(0, 1).index_copy_(0, targets, rows)

    def views(self, asked: Sequence[Seen]) -> Iterator[Part]:
        """Yield what each of some rows sees."""
        for number, begin, count in asked:
            rows = self.rows[number, None, : min(begin + count, self.slots)]
            yield rows, None if count == rows.shape[1] else self._mask(rows, begin, count)

    def read(self, seen: torch.Tensor) -> Iterator[Part]:
        """Yield what rows see of which only the device knows the fields of `Seen`, int64
        [3, rows].
        """
        for numbers, begins, counts in torch.split(seen, AT_ONCE, dim=1):
            rows = self.rows.index_select(0, numbers)
            yield rows, self._mask(rows, begins[:, None], counts[:, None])

    def _mask(
        self, rows: torch.Tensor, begin: int | torch.Tensor, count: int | torch.Tensor
    ) -> torch.Tensor:
        """Return which of the rows are seen, bool [windows, slots]."""
        slots = torch.arange(rows.shape[1], device=rows.device)[None]
        return (slots - begin) % self.slots < count

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
        assert numbers == list(range(len(self.rows) - 1)), "a window is lost or held twice"
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
        seen: Iterable[Part],
    ) -> torch.Tensor:
        """Return the layer's state of each row, [rows, hidden]. seen: what each attends to,
        including itself.
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
        """Return the model's token for each drafted one, int64, or None if they are the same."""
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
        self._captured: CapturedGuesses | None = None
        self._rows, self._seen = torch.empty(3, 0), torch.empty(3, 0)
        """What captured steps read: token, position and target of each row, and what the rows that
        are asked for see.
        """
        self.reads = head.spec.layers
        self.window = WINDOW
        self.states = head.states

    def capture(self, port: GraphPort, sizes: CapturedSizes) -> None:
        """Have rows from now on computed by captured steps where they fit into these."""
        head, most_asked = self._head, sizes.most_rows
        num_rows = most_rows(most_asked, sizes.most_drafts)
        device = head.device
        self._rows = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        self._seen = torch.zeros(3, most_asked, dtype=torch.int64, device=device)
        self._fill([], [], num_rows)

        def guess(
            size: int, states: torch.Tensor, last: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            seen = self.windows.read(self._seen[:, :size])
            return self._guess(self._rows[:, :size], states, last, seen)

        states = torch.zeros(num_rows, head.spec.hidden_size, dtype=head.dtype, device=device)
        self._captured = CapturedGuesses(port, self._copies, guess, states, most_asked)

    def compute(
        self, slots: Sequence[StepSlot], states: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of the slots' tokens; see `DraftLayer`. A row's position is that of the
        state before its token, as in the training of heads.
        """
        rows: list[tuple[int, int, int]] = []
        asked: list[Seen] = []
        for slot in slots:
            targets, seen = self.windows.take(slot.sequence_id, slot.start, len(slot.tokens))
            places = range(slot.start, slot.start + len(slot.tokens))
            rows += [
                (token, place - 1, target)
                for token, place, target in zip(slot.tokens, places, targets, strict=True)
            ]
            asked += [seen] if slot.sample else []
        captured, last = self._captured, last_rows(slots)
        if captured is not None and len(rows) <= self._rows.shape[1]:
            size = captured.size_for(len(rows))
            self._fill(rows, asked, size, tokens)
            return captured.replay(size, states, last)
        values = self._copies.send(torch.tensor([*zip(*rows, strict=True)]))
        if tokens is not None:
            values[_TOKENS].copy_(tokens)
        if not asked:
            self._write(values, states)
            return states[:0], values[_TOKENS, :0]
        on_device = self._copies.send(torch.tensor(last))
        return self._guess(values, states, on_device, self.windows.views(asked))

    def _fill(
        self,
        rows: Sequence[tuple[int, int, int]],
        asked: Sequence[Seen],
        size: int,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """Write what the next captured step of `size` rows reads. Rows that no one needs are
        written to the last window, and see it.
        """
        other = len(self.windows.rows) - 1
        unused = (0, 0, other * self.windows.slots)
        padded = [*rows, *[unused] * (size - len(rows))]
        seen = self._seen[:, :size]
        each = [*asked, *[Seen(other, 0, 1)] * (seen.shape[1] - len(asked))]
        self._rows[:, :size].copy_(self._copies.send(torch.tensor([*zip(*padded, strict=True)])))
        if tokens is not None:
            self._rows[_TOKENS, : len(rows)].copy_(tokens)
        seen.copy_(self._copies.send(torch.tensor([*zip(*each, strict=True)])))

    def _write(self, rows: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the KV of rows. Return their input of attention, and their rotation."""
        head, (tokens, positions, targets) = self._head, rows
        rotation = head.attention.rope.rotation(positions)
        joined = head.joined(tokens, states)
        self.windows.write(targets, head.attention.keys_values(joined, rotation))
        return joined, rotation

    def _guess(
        self,
        rows: torch.Tensor,
        states: torch.Tensor,
        last: torch.Tensor,
        seen: Iterable[Part],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the KV of rows. Return the layer's states of the rows `last`, which see `seen`, and
        the likeliest token after each.
        """
        joined, rotation = self._write(rows, states)
        made = self._head.attend(joined[last], rotation[last], states[last], seen)
        return made, self._head.likeliest(made)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Free the windows of sequences."""
        self.windows.forget(sequence_ids)

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Raise AssertionError when a sequence other than these has a window, or a window
        is lost.
        """
        self.windows.check_integrity(sequences)
