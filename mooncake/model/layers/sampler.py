"""Samples tokens from logits. Owns the sampling state of each running sequence: its settings, the
number of its output tokens, and the token counts that penalties need.

There is no model, no page and no generator state. The random number of a token depends only on the
request's seed and the token's place in the output, so a sequence continues unchanged on another
worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mooncake_kernels.dispatch import FIXED, NATIVE, TRITON, kernel
from mooncake_kernels.reference import sampling as on_device

from mooncake.base import (
    Failure,
    GenerateRequest,
    Grammar,
    InternalError,
    MooncakeError,
    SamplingParams,
    TokenLogprobs,
    Unavailable,
    pack_tokens,
)
from mooncake.base.bounded_map import BoundedMap
from mooncake.engine.sequence import Sequence as EngineSequence
from mooncake.model.backends import Backends
from mooncake.model.copies import Arriving, Copies, HostCopies
from mooncake.model.grammars.following import Follower, Grammars
from mooncake.model.grammars.grammar_tokens import bits_of
from mooncake.model.layers.sampling_math import (
    BadWords,
    MostLikely,
    Place,
    draw,
    token_logprobs,
    uniform,
)

DrawTokens = Callable[[torch.Tensor, on_device.DrawSettings], torch.Tensor]
Penalize = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, on_device.Penalties], None]
Mask = Callable[[torch.Tensor, torch.Tensor], None]
_MASK_RATIO = 8
"""Rows that hide more than this part of the vocabulary hide it with a mask, not token by token."""
MAX_SHARED = 64
"""How many calls' settings are kept as tensors."""


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """The operations on all rows at once; contracts: `mooncake_kernels.reference.sampling`."""

    draw: DrawTokens = draw
    penalize: Penalize = on_device.penalize
    mask: Mask = on_device.mask
    most_likely: MostLikely = on_device.most_likely
    waits: bool = True
    """Whether the host may read numbers on the way; false if it would wait for a device. Then
    `draw` also gets rows of temperature 0.
    """


PLAIN_OPS = SamplingOps()


def sampling_ops(backends: Backends) -> SamplingOps:
    """Return the operations that choose tokens. On a GPU these are kernels, so that a step never
    waits for the host; on the CPU compiled code, if the model has some.
    """
    if backends.attention == TRITON:
        return SamplingOps(kernel("draw", TRITON), kernel("penalize", TRITON), waits=False)
    if backends.attention in (NATIVE, FIXED):
        names = ("draw", "penalize", "mask", "most_likely")
        return SamplingOps(*(kernel(name, NATIVE) for name in names))
    return PLAIN_OPS


Sampled = tuple[list[int], dict[int, TokenLogprobs]]
"""The token of each row, and by row the log-probabilities of those whose sequences want them."""


class Sampler:
    """Samples the next tokens of many sequences, each by its own settings.

    The order is vLLM's: allowed tokens and masks, stop tokens held back before `min_tokens`, logit
    bias, penalties; then the most likely token (temperature 0), or temperature, min-p, top-k, top-p
    and a draw. Logprobs are those of the logits as the model gave them.
    """

    def __init__(
        self,
        vocab_size: int,
        grammars: Grammars | None = None,
        *,
        copies: Copies | None = None,
        ops: SamplingOps = PLAIN_OPS,
    ) -> None:
        """grammars: follows the grammars of requests; None: requests may not have one. copies: to
        and from the device of the logits; None: the logits are on the host.
        """
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._copies = copies or HostCopies()
        self._ops = ops
        self._sequences: dict[int, _Sequence] = {}
        self._history = _History(vocab_size, self._copies)
        self._shared: BoundedMap[tuple[int, ...], _Shared] = BoundedMap(MAX_SHARED)
        """Identities of lists -> what is made of them. Those used last are at the end."""

    def start(self, start: EngineSequence) -> None:
        """Add a sequence, new or resumed (`output_tokens` not empty).

        It replaces a sequence with the same id.
        """
        self.forget(start.sequence_id)
        sampling = start.request.sampling
        shared = self._shared_of(sampling)
        place = None
        if (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty
            or sampling.frequency_penalty
        ):
            output = _ids(start.output_tokens, self._vocab_size)
            seen = output
            if sampling.repetition_penalty != 1.0:
                seen = torch.cat((_ids(start.prompt_tokens, self._vocab_size), output))
            place = self._history.add(seen, output)
        sequence = _Sequence(
            sampling=sampling,
            shared=shared,
            num_output=len(start.output_tokens),
            word_place=shared.words.start(start.output_tokens) if shared.words else None,
            place=place,
        )
        grammar = sampling.grammar
        if grammar is not None:
            if self._grammars is None:
                raise InternalError(f"sequence {start.sequence_id}: this worker has no grammars")
            sequence.follower = self._grammars.follow(grammar, start.output_tokens)
        self._sequences[start.sequence_id] = sequence

    def _shared_of(self, sampling: SamplingParams) -> _Shared:
        """Return the lists of `sampling` as tensors. Sequences of one call have the same lists
        (`base.large_settings`), which may be long, so they are read once.
        """
        lists = (
            sampling.allowed_token_ids,
            sampling.stop_token_ids,
            sampling.logit_bias,
            sampling.bad_words,
        )
        key = tuple(id(each) if each else 0 for each in lists)
        shared = self._shared.use(key)
        if shared is None:
            shared = self._shared[key] = _Shared(sampling, self._vocab_size)
        return shared

    def prepare(self, grammar: Grammar) -> None:
        """Start compiling the grammar of a coming sequence. Any thread may call this."""
        if self._grammars is not None:
            self._grammars.prepare(grammar)

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence. Unknown ids are ignored."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None and sequence.place is not None:
            self._history.remove(sequence.place)

    def broken(self, sequence_ids: Sequence[int]) -> dict[int, Failure]:
        """Return which of these sequences cannot continue, and why: no worker can follow their
        grammar, or this one cannot (503).

        Waits for the masks of the others. Call this before `sample`.
        """
        failures: dict[int, Failure] = {}
        for sequence_id in reversed(sequence_ids):  # the last mask: one wait for all
            sequence = self._known(sequence_id)
            if sequence.follower is None:
                continue
            try:
                mask = sequence.follower.allowed()
            except Unavailable as error:
                failures[sequence_id] = Failure.unavailable(error.message)
            except MooncakeError as error:
                failures[sequence_id] = Failure.invalid(error.message)
            else:
                sequence.mask = mask
        return failures

    def sample(
        self,
        logits: torch.Tensor,
        sequence_ids: Sequence[int],
        chosen: Callable[[torch.Tensor], None] | None = None,
    ) -> Sampled:
        """Return one token per row of `logits` [rows, vocab] fp32, and add each to its sequence.

        `chosen` is called with the tokens, int64 [rows] on the device, before the host waits for
        them. It may overwrite `logits`, so it is not called when log-probabilities are wanted.

        Raises:
            InternalError: a sequence was not started, its logits hold NaN or infinity, or all its
                tokens are masked; the message names it. Then no sequence is changed.
        """
        drawn, arriving = self.begin(logits, sequence_ids)
        sequences = [self._known(sequence_id) for sequence_id in sequence_ids]
        wanted = any(sequence.sampling.num_logprobs is not None for sequence in sequences)
        if chosen is not None and not wanted:
            chosen(drawn)
        numbers, largest = arriving.wait().tolist()
        for sequence_id, logit in zip(sequence_ids, largest, strict=True):
            if not math.isfinite(logit):
                raise InternalError(f"sequence {sequence_id}: the largest logit is {logit}")
        tokens = [int(token) for token in numbers]
        logprobs = self._logprobs(logits, tokens, sequences) if wanted else {}
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.append(token)
        self._history.append(
            [
                (sequence.place, token)
                for sequence, token in zip(sequences, tokens, strict=True)
                if sequence.place is not None
            ]
        )
        return tokens, logprobs

    def begin(
        self, logits: torch.Tensor, sequence_ids: Sequence[int]
    ) -> tuple[torch.Tensor, Arriving]:
        """Choose one token per row of `logits`, without waiting for a device. Return the tokens,
        int64 [rows] on the device, and on their way to the host: float64 [2, rows], the tokens and
        each row's largest logit. Raises InternalError as `sample` does.
        """
        if tuple(logits.shape) != (len(sequence_ids), self._vocab_size):
            raise InternalError(
                f"logits of shape {tuple(logits.shape)} for {len(sequence_ids)} sequences and "
                f"{self._vocab_size} tokens"
            )
        sequences = [self._known(sequence_id) for sequence_id in sequence_ids]
        adjusted = self._adjusted(logits, sequences) if sequences else logits
        best = adjusted.max(dim=-1)
        if self._ops.waits:
            tokens = self._choose(adjusted, best, sequences, sequence_ids)
        else:
            tokens = self._ops.draw(adjusted, self._settings(sequences))
        arriving = self._copies.fetch(torch.stack((tokens.double(), best.values.double())))
        return tokens, arriving

    def try_out(self, logits: torch.Tensor) -> None:
        """Begin to sample a token of each row of `logits` [rows, vocab] fp32 with all features that
        take kernels or memory. No sequence may have been started, and none exists afterwards.
        """
        assert not self._sequences, "there are sequences already"
        costly = SamplingParams(temperature=0.5, top_k=50, top_p=0.9, min_p=0.01,
                                repetition_penalty=1.1, presence_penalty=0.1)  # fmt: skip
        request = GenerateRequest(request_id="", prompt=pack_tokens([0]), sampling=costly)
        for row in range(len(logits)):
            self.start(EngineSequence(sequence_id=row, request=request))
        self.begin(logits, range(len(logits)))
        for row in range(len(logits)):
            self.forget(row)

    def prompt_logprobs(
        self, logits: torch.Tensor, next_tokens: Sequence[int], num: int
    ) -> list[TokenLogprobs]:
        """Return the logprobs of each prompt token that follows a row of `logits` [rows, vocab]."""
        return token_logprobs(logits, next_tokens, [num] * len(next_tokens), self._ops.most_likely)

    def _logprobs(
        self, logits: torch.Tensor, tokens: list[int], sequences: list[_Sequence]
    ) -> dict[int, TokenLogprobs]:
        asked = {
            row: sequence.sampling.num_logprobs
            for row, sequence in enumerate(sequences)
            if sequence.sampling.num_logprobs is not None
        }
        rows = list(asked)
        part = logits if len(rows) == len(logits) else logits[rows]
        results = token_logprobs(
            part, [tokens[row] for row in rows], list(asked.values()), self._ops.most_likely
        )
        return dict(zip(rows, results, strict=True))

    def _known(self, sequence_id: int) -> _Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise InternalError(f"sequence {sequence_id} was not started in the sampler")
        return sequence

    def _choose(
        self,
        logits: torch.Tensor,
        best: Any,
        sequences: list[_Sequence],
        sequence_ids: Sequence[int],
    ) -> torch.Tensor:
        """Return the tokens. Reads numbers on the way, to compute no more than is needed."""
        finite = torch.isfinite(best.values)
        if not bool(finite.all()):
            row = finite.tolist().index(False)
            raise InternalError(
                f"sequence {sequence_ids[row]}: the largest logit is {float(best.values[row])}"
            )
        tokens: torch.Tensor = best.indices
        drawn = [row for row, sequence in enumerate(sequences) if not sequence.sampling.greedy]
        if drawn:
            rows = logits if len(drawn) == len(sequences) else logits[drawn]
            found = self._ops.draw(rows, self._settings([sequences[row] for row in drawn]))
            if rows is logits:
                return found
            tokens[drawn] = found
        return tokens

    def _settings(self, sequences: list[_Sequence]) -> on_device.DrawSettings:
        """Return the settings of `sequences`, sent as one tensor."""
        rows = [
            (
                each.sampling.temperature,
                each.sampling.top_k,
                each.sampling.top_p,
                each.sampling.min_p,
                uniform(each.sampling.seed, each.num_output),
            )
            for each in sequences
        ]
        columns = torch.tensor(rows, dtype=torch.float64).view(-1, 5).t().contiguous()
        there = self._copies.send(columns)
        return on_device.DrawSettings(
            there[0].float(), there[1].to(torch.int32), there[2], there[3], there[4]
        )

    def _adjusted(self, logits: torch.Tensor, sequences: list[_Sequence]) -> torch.Tensor:
        """Return `logits` with the masks, bias and penalties of each row, in this order."""
        if not any(sequence.changes_logits for sequence in sequences):
            return logits
        adjusted = logits.clone()
        masks = {row: each.mask for row, each in enumerate(sequences) if each.mask is not None}
        if masks:
            self._mask(adjusted, list(masks), torch.stack(list(masks.values())))
        self._leave_allowed(adjusted, sequences)
        held = [(row, each.held_back) for row, each in enumerate(sequences)]
        self._hide(adjusted, [(row, ids) for row, ids in held if ids is not None], sequences)
        words = [(row, each.completing) for row, each in enumerate(sequences)]
        self._hide(adjusted, [(row, ids) for row, ids in words if ids is not None], sequences)
        self._add_bias(adjusted, sequences)
        self._take_penalties(adjusted, sequences)
        return adjusted

    def _mask(self, logits: torch.Tensor, rows: list[int], allowed: torch.Tensor) -> None:
        """Leave these rows only the tokens of the host's `allowed`: uint8 [rows, bytes], bits."""
        there = self._copies.send(allowed)
        if len(rows) == len(logits):
            self._ops.mask(logits, there)
            return
        at = self._copies.send(torch.tensor(rows))
        part = logits.index_select(0, at)
        self._ops.mask(part, there)
        logits.index_copy_(0, at, part)

    def _leave_allowed(self, logits: torch.Tensor, sequences: list[_Sequence]) -> None:
        """Mask tokens that are not in `allowed_token_ids`, for rows that share them at once."""
        found = [(row, each.shared.allowed) for row, each in enumerate(sequences)]
        for allowed, rows in _grouped([(row, each) for row, each in found if each is not None]):
            guarded = [row for row in rows if sequences[row].mask is not None]
            with self._unless_empty(logits, guarded):
                self._mask(logits, rows, allowed.repeat(len(rows), 1))

    def _hide(
        self,
        logits: torch.Tensor,
        hidden: list[tuple[int, torch.Tensor]],
        sequences: list[_Sequence],
    ) -> None:
        """Mask these tokens of these rows."""
        if not hidden:
            return
        guarded = [row for row, _ in hidden if sequences[row].may_lose_all]
        few: list[tuple[int, torch.Tensor]] = []
        with self._unless_empty(logits, guarded):
            for ids, rows in _grouped(hidden):
                if len(ids) * _MASK_RATIO < self._vocab_size or len(rows) == 1:
                    few += [(row, ids) for row in rows]
                else:
                    left = ~bits_of(ids, self._vocab_size)
                    self._mask(logits, rows, left.repeat(len(rows), 1))
            if few:
                logits.view(-1).index_fill_(0, self._places(few), -torch.inf)

    @contextmanager
    def _unless_empty(self, logits: torch.Tensor, rows: list[int]) -> Iterator[None]:
        """Undo the block's masks in those of `rows` that they leave without any token.

        So grammars and settings always leave a token, and no request can end a step that others
        share.
        """
        if not rows:
            yield
            return
        at = self._copies.send(torch.tensor(rows))
        before = logits.index_select(0, at)
        yield
        after = logits if len(rows) == len(logits) else logits.index_select(0, at)
        empty = after.amax(dim=-1, keepdim=True).isneginf()
        if self._ops.waits and not bool(empty.any()):
            return
        logits.index_copy_(0, at, torch.where(empty, before, after))

    def _add_bias(self, logits: torch.Tensor, sequences: list[_Sequence]) -> None:
        biased = {
            row: each.shared for row, each in enumerate(sequences) if each.shared.bias is not None
        }
        if biased:
            ids = [(row, shared.bias_ids) for row, shared in biased.items()]
            values = [biased[row].bias for _, rows in _grouped(ids) for row in rows]
            more = torch.cat([each for each in values if each is not None])
            logits.view(-1).index_add_(0, self._places(ids), self._copies.send(more))

    def _places(self, ids: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Return the places of these tokens of these rows among all logits, in the order of
        `_grouped`: rows with the same tensor follow each other.
        """
        parts = [
            (torch.tensor(rows)[:, None] * self._vocab_size + each).view(-1)
            for each, rows in _grouped(ids)
        ]
        return self._copies.send(torch.cat(parts))

    def _take_penalties(self, logits: torch.Tensor, sequences: list[_Sequence]) -> None:
        """Subtract penalties from their rows of `logits`, all at once."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.place is not None]
        if not rows:
            return
        there = self._copies.send(torch.tensor(rows))
        part = logits if len(rows) == len(logits) else logits.index_select(0, there)
        penalized = [sequences[row] for row in rows]
        # The number of rows is padded to a multiple of four, because Triton compiles a kernel anew
        # for an unaligned tensor.
        settings = torch.zeros(3, -(-len(rows) // 4) * 4)
        settings[:, : len(rows)] = torch.tensor(
            [
                [each.sampling.repetition_penalty for each in penalized],
                [each.sampling.presence_penalty for each in penalized],
                [each.sampling.frequency_penalty for each in penalized],
            ]
        )
        places = [each.place for each in penalized if each.place is not None]
        self._ops.penalize(
            part,
            *self._history.rows(places),
            on_device.Penalties(*self._copies.send(settings)[:, : len(rows)]),
        )
        if part is not logits:
            logits.index_copy_(0, there, part)


class _History:
    """The tokens that sequences with penalties have, one row for each, on the device."""

    def __init__(self, vocab_size: int, copies: Copies) -> None:
        self._vocab_size = vocab_size
        self._copies = copies
        self._seen = copies.send(torch.zeros(0, vocab_size, dtype=torch.bool))
        """bool: the tokens of prompt and output, if a repetition penalty needs them."""
        self._counts = copies.send(torch.zeros(0, vocab_size, dtype=torch.int32))
        """How often each token is in the output."""
        self._free: list[int] = []

    def add(self, seen: torch.Tensor, output: torch.Tensor) -> int:
        """Return the place of a new sequence. seen, output: int64 ids on the host."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        marks = torch.zeros(self._vocab_size, dtype=torch.bool).index_fill_(0, seen, True)
        self._seen[place] = self._copies.send(marks)
        counts = torch.bincount(output, minlength=self._vocab_size).int()
        self._counts[place] = self._copies.send(counts)
        return place

    def remove(self, place: int) -> None:
        self._free.append(place)

    def append(self, tokens: list[tuple[int, int]]) -> None:
        """Add one token to each of these (place, token). The places must differ."""
        if tokens:
            at = torch.tensor([place * self._vocab_size + token for place, token in tokens])
            there = self._copies.send(at)
            self._seen.view(-1).index_fill_(0, there, True)
            more = torch.ones_like(there, dtype=torch.int32)
            self._counts.view(-1).index_add_(0, there, more)

    def rows(self, places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (seen, counts) of these places, each [places, vocab]."""
        at = self._copies.send(torch.tensor(places))
        return self._seen.index_select(0, at), self._counts.index_select(0, at)

    def _grow(self) -> None:
        size = len(self._seen)
        more = torch.zeros(max(4, size), self._vocab_size, dtype=torch.bool)
        self._seen = torch.cat((self._seen, self._copies.send(more)))
        self._counts = torch.cat((self._counts, self._copies.send(more.int())))
        self._free = list(range(len(self._seen) - 1, size - 1, -1))


class _Shared:
    """The lists of a request's settings as tensors on the host, made once for all sequences of a
    call.
    """

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        self.of = sampling
        """Keeps alive the lists, by whose identity this is found."""
        self.allowed: torch.Tensor | None = None
        """The bits of `allowed_token_ids` in the form of `bits_of`."""
        if sampling.allowed_token_ids:
            allowed = _ids(sampling.allowed_token_ids, vocab_size)
            if len(allowed):
                self.allowed = bits_of(allowed, vocab_size)
        self.stop_ids = _ids(sorted(sampling.stop_token_ids), vocab_size)
        """int64."""
        biases = {t: value for t, value in sampling.logit_bias.items() if 0 <= t < vocab_size}
        self.bias_ids = _ids(list(biases), vocab_size)
        self.bias = torch.tensor(list(biases.values()), dtype=torch.float32) if biases else None
        """float32, one for each of `bias_ids`."""
        self.words = BadWords(sampling.bad_words, vocab_size) if sampling.bad_words else None
        num_hidden = len(self.stop_ids) + (self.words.num_ends if self.words else 0)
        self.may_lose_all = self.allowed is not None or num_hidden >= vocab_size
        """Whether bad words and stop tokens that are held back may leave a row without any
        token.
        """


@dataclass(slots=True)
class _Sequence:
    """One sequence's settings and its history."""

    sampling: SamplingParams
    shared: _Shared
    num_output: int
    word_place: Place | None
    """The place in the bad words; None: there are none."""
    place: int | None
    """The place in the history, if a penalty needs one."""
    follower: Follower | None = None
    mask: torch.Tensor | None = None
    """Bits of the tokens that the grammar allows at this step, in the form of `bits_of`."""

    @property
    def held_back(self) -> torch.Tensor | None:
        """Return the stop tokens until `min_tokens` tokens are out."""
        return self.shared.stop_ids if self.num_output < self.sampling.min_tokens else None

    @property
    def completing(self) -> torch.Tensor | None:
        """Return the tokens that would complete a bad word."""
        return None if self.word_place is None else self.word_place.completing

    @property
    def may_lose_all(self) -> bool:
        return self.mask is not None or self.shared.may_lose_all

    @property
    def changes_logits(self) -> bool:
        shared = self.shared
        asked = (shared.allowed, shared.bias, shared.words, self.place, self.mask)
        return any(each is not None for each in asked) or self.held_back is not None

    def append(self, token: int) -> None:
        self.num_output += 1
        if self.word_place is not None and self.shared.words is not None:
            self.word_place = self.shared.words.next(self.word_place, token)
        if self.follower is not None:
            self.follower.advance(token)


def _grouped(ids: list[tuple[int, torch.Tensor]]) -> list[tuple[torch.Tensor, list[int]]]:
    """Return each tensor once, with the rows that have it."""
    groups: dict[int, tuple[torch.Tensor, list[int]]] = {}
    for row, each in ids:
        groups.setdefault(id(each), (each, []))[1].append(row)
    return list(groups.values())


def _ids(tokens: Sequence[int], vocab_size: int) -> torch.Tensor:
    """Return those of `tokens` that the vocabulary has, int64."""
    found = np.asarray(tokens, dtype=np.int64)
    return torch.from_numpy(found[(found >= 0) & (found < vocab_size)])
