"""From logits to tokens. Owns the sampling state of each running sequence: its settings, the number
of its output tokens, and the token counts that penalties need.

No model, no pages, no generator state: the random number of a token follows from the request's seed
and the token's place in the output, so a sequence goes on unchanged on another worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mooncake_kernels.reference import sampling as on_device

from mooncake.base import (
    Failure,
    Grammar,
    InternalError,
    MooncakeError,
    SamplingParams,
    TokenLogprobs,
    Unavailable,
)
from mooncake.engine.plan import Sample, SequenceStart
from mooncake.model.copies import Arriving, Copies, HostCopies
from mooncake.model.grammar import Follower, Grammars
from mooncake.model.layers.sampling_math import (
    DrawSettings,
    draw,
    token_logprobs,
    uniform,
)

DrawTokens = Callable[[torch.Tensor, on_device.DrawSettings], torch.Tensor]
Penalize = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, on_device.Penalties], None]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens chosen on the device, being copied to the host."""

    tokens: torch.Tensor
    """int64 [rows], on the device."""
    sequence_ids: Sequence[int]
    arriving: Arriving
    """float64 [2, rows]: the tokens and each row's largest logit."""
    logits: torch.Tensor | None
    """The unmodified logits when logprobs are wanted; must not change until `finish`."""


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
        draw_tokens: DrawTokens | None = None,
        penalize: Penalize = on_device.penalize,
    ) -> None:
        """`grammars` follows the grammars of requests; None = requests may not have one.

        copies: to and from the device of the logits; None = it is the host. draw_tokens: draws
        without a look from the host (contract: `mooncake_kernels.reference.sampling`); None = what
        is fast on a CPU. penalize: takes penalties off many rows (its contract is beside draw's).
        """
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._copies = copies or HostCopies()
        self._draw_tokens = draw_tokens
        self._penalize = penalize
        self._sequences: dict[int, _Sequence] = {}

    def start(self, start: SequenceStart) -> None:
        """Add a sequence, new or resumed (`output_tokens` not empty).

        It replaces a sequence with the same id.
        """
        sequence = _Sequence.begin(start, self._vocab_size, self._copies)
        grammar = start.sampling.grammar
        if grammar is not None:
            if self._grammars is None:
                raise InternalError(f"sequence {start.sequence_id}: no grammars are followed here")
            sequence.follower = self._grammars.follow(grammar, start.output_tokens)
        self._sequences[start.sequence_id] = sequence

    def prepare(self, grammar: Grammar) -> None:
        """Start compiling the grammar of a sequence to come. From any thread."""
        if self._grammars is not None:
            self._grammars.prepare(grammar)

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence; unknown ids are ignored."""
        self._sequences.pop(sequence_id, None)

    def broken(self, sequence_ids: Sequence[int]) -> dict[int, Failure]:
        """Return which of these sequences cannot go on, and why: their grammar cannot be followed,
        by no worker or (503) by this one.

        Waits for the masks of the others. To be called before `sample`.
        """
        failures: dict[int, Failure] = {}
        for sequence_id in sequence_ids:
            sequence = self._known(sequence_id)
            if sequence.follower is None:
                continue
            try:
                mask = sequence.follower.forbidden()
            except Unavailable as error:
                failures[sequence_id] = Failure.unavailable(error.message)
            except MooncakeError as error:
                failures[sequence_id] = Failure.invalid(error.message)
            else:
                sequence.mask = None if mask is None else self._copies.send(mask)
        return failures

    def sample(self, logits: torch.Tensor, sequence_ids: Sequence[int]) -> list[Sample]:
        """Return one sample per row of `logits` [rows, vocab] fp32; each is added to its sequence.

        Raises:
            InternalError: a sequence was not started, or its logits hold NaN or infinity, or all
                tokens are masked; the message names it. No sequence is changed then.
        """
        return self.finish(self.begin(logits, sequence_ids))

    def begin(self, logits: torch.Tensor, sequence_ids: Sequence[int]) -> Drawn:
        """Choose one token per row of `logits` [rows, vocab] fp32, waiting for nothing on a device.

        `finish` must follow before the next `begin`. Raises InternalError as `sample` does.
        """
        if tuple(logits.shape) != (len(sequence_ids), self._vocab_size):
            raise InternalError(
                f"logits of shape {tuple(logits.shape)} for {len(sequence_ids)} sequences and "
                f"{self._vocab_size} tokens"
            )
        sequences = [self._known(sequence_id) for sequence_id in sequence_ids]
        adjusted = self._adjusted(logits, sequences) if sequences else logits
        best = adjusted.max(dim=-1)
        if self._draw_tokens is not None:
            tokens = self._draw_tokens(adjusted, self._settings(sequences))
        else:
            tokens = self._choose(adjusted, best, sequences, sequence_ids)
        arriving = self._copies.fetch(torch.stack((tokens.double(), best.values.double())))
        wanted = any(sequence.sampling.num_logprobs is not None for sequence in sequences)
        return Drawn(tokens, sequence_ids, arriving, logits if wanted else None)

    def finish(self, drawn: Drawn) -> list[Sample]:
        """Wait for the tokens, add each to its sequence, and return the samples."""
        chosen, largest = drawn.arriving.wait().tolist()
        for sequence_id, logit in zip(drawn.sequence_ids, largest, strict=True):
            if not math.isfinite(logit):
                raise InternalError(f"sequence {sequence_id}: the largest logit is {logit}")
        tokens = [int(token) for token in chosen]
        sequences = [self._known(sequence_id) for sequence_id in drawn.sequence_ids]
        logprobs = {} if drawn.logits is None else _logprobs(drawn.logits, tokens, sequences)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.append(token)
        return [
            Sample(sequence_id=sequence_id, token=token, logprobs=logprobs.get(row))
            for row, (sequence_id, token) in enumerate(zip(drawn.sequence_ids, tokens, strict=True))
        ]

    def try_out(self, logits: torch.Tensor) -> None:
        """Begin to sample a token of each row of `logits` [rows, vocab] fp32 with all that takes
        kernels or memory. No sequence may have been started; none is there afterwards.
        """
        assert not self._sequences, "there are sequences already"
        costly = SamplingParams(temperature=0.5, top_k=50, top_p=0.9, min_p=0.01,
                                repetition_penalty=1.1, presence_penalty=0.1)  # fmt: skip
        for row in range(len(logits)):
            self.start(
                SequenceStart(sequence_id=row, sampling=costly, prompt_tokens=[], output_tokens=[])
            )
        self.begin(logits, range(len(logits)))
        self._sequences.clear()

    def prompt_logprobs(
        self, logits: torch.Tensor, next_tokens: Sequence[int], num: int
    ) -> list[TokenLogprobs]:
        """Return the logprobs of each prompt token that follows a row of `logits` [rows, vocab]."""
        return token_logprobs(logits, next_tokens, [num] * len(next_tokens))

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
        """Return the tokens, looking at the numbers on the way to do no more than is needed."""
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
            columns = self._settings([sequences[row] for row in drawn])
            settings = DrawSettings(
                temperature=columns.temperature[:, None],
                top_k=columns.top_k.long()[:, None],
                top_p=columns.top_p[:, None],
                min_p=columns.min_p[:, None],
                uniform=columns.uniform[:, None],
            )
            tokens[drawn] = draw(rows, settings)
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
        changed = [row for row, sequence in enumerate(sequences) if sequence.changes_logits]
        if not changed:
            return logits
        adjusted = logits.clone()
        for row in changed:
            adjusted[row] = sequences[row].adjust(logits[row], self._copies)
        penalized = [row for row in changed if sequences[row].penalized]
        if penalized:
            self._take_penalties(adjusted, penalized, [sequences[row] for row in penalized])
        return adjusted

    def _take_penalties(
        self, logits: torch.Tensor, rows: list[int], sequences: list[_Sequence]
    ) -> None:
        """Take penalties off these rows of `logits`, all at once."""
        there = self._copies.send(torch.tensor(rows))
        part = logits if len(rows) == len(logits) else logits.index_select(0, there)
        unseen = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        uncounted = torch.zeros(logits.shape[1], dtype=torch.int32, device=logits.device)
        # Rows of a multiple of four: Triton compiles a kernel anew for one at an odd place.
        settings = torch.zeros(3, -(-len(sequences) // 4) * 4)
        settings[:, : len(sequences)] = torch.tensor(
            [
                [each.sampling.repetition_penalty for each in sequences],
                [each.sampling.presence_penalty for each in sequences],
                [each.sampling.frequency_penalty for each in sequences],
            ]
        )
        self._penalize(
            part,
            torch.stack([unseen if each.seen is None else each.seen for each in sequences]),
            torch.stack([uncounted if each.counts is None else each.counts for each in sequences]),
            on_device.Penalties(*self._copies.send(settings)[:, : len(sequences)]),
        )
        if part is not logits:
            logits.index_copy_(0, there, part)


@dataclass(slots=True)
class _Sequence:
    """One sequence's settings, as tensors where they touch logits, and its history."""

    sampling: SamplingParams
    num_output: int
    forbidden: torch.Tensor | None
    """bool [vocab]: tokens outside `allowed_token_ids`."""
    held_back: torch.Tensor | None
    """int64: stop tokens, until `min_tokens` are out."""
    bias_ids: torch.Tensor | None
    bias_values: torch.Tensor | None
    seen: torch.Tensor | None
    """bool [vocab]: tokens of prompt and output, where a repetition penalty asks for them."""
    counts: torch.Tensor | None
    """int32 [vocab]: how often each token is in the output, where a penalty asks for it."""
    recent: list[int]
    """As many of the last output tokens as bad words need to be recognised."""
    follower: Follower | None = None
    mask: torch.Tensor | None = None
    """bool [vocab]: tokens the grammar forbids at this step."""

    @classmethod
    def begin(cls, start: SequenceStart, vocab_size: int, copies: Copies) -> _Sequence:
        sampling = start.sampling

        def ids(tokens: Sequence[int]) -> torch.Tensor:
            return torch.tensor([t for t in tokens if 0 <= t < vocab_size], dtype=torch.int64)

        def marked(tokens: Sequence[int]) -> torch.Tensor:
            marks = torch.zeros(vocab_size, dtype=torch.bool)
            marks[ids(tokens)] = True
            return marks

        def sent(made: torch.Tensor | None) -> torch.Tensor | None:
            return None if made is None else copies.send(made)

        counts = None
        if sampling.presence_penalty or sampling.frequency_penalty:
            counts = torch.bincount(ids(start.output_tokens), minlength=vocab_size).int()
        biases = [(t, value) for t, value in sampling.logit_bias.items() if 0 <= t < vocab_size]
        seen = None
        if sampling.repetition_penalty != 1.0:
            seen = marked([*start.prompt_tokens, *start.output_tokens])
        allowed = sampling.allowed_token_ids
        return cls(
            sampling=sampling,
            num_output=len(start.output_tokens),
            forbidden=sent(~marked(allowed) if allowed else None),
            held_back=sent(ids(sampling.stop_token_ids) if sampling.min_tokens else None),
            bias_ids=sent(ids([t for t, _ in biases]) if sampling.logit_bias else None),
            bias_values=sent(torch.tensor([v for _, v in biases], dtype=torch.float32))
            if sampling.logit_bias
            else None,
            seen=sent(seen),
            counts=sent(counts),
            recent=list(start.output_tokens[-_longest(sampling.bad_words) :])
            if sampling.bad_words
            else [],
        )

    @property
    def holds_back(self) -> bool:
        return self.held_back is not None and self.num_output < self.sampling.min_tokens

    @property
    def penalized(self) -> bool:
        return self.seen is not None or self.counts is not None

    @property
    def changes_logits(self) -> bool:
        tensors = (self.forbidden, self.bias_ids, self.seen, self.counts, self.mask)
        asked = self.holds_back or bool(self.sampling.bad_words)
        return asked or any(tensor is not None for tensor in tensors)

    def adjust(self, row: torch.Tensor, copies: Copies) -> torch.Tensor:
        """Return `row` [vocab] with masks and bias applied; penalties come after them."""
        if self.mask is not None:
            row = row.masked_fill(self.mask, -torch.inf)
        if self.forbidden is not None:
            row = _unless_empty(row, row.masked_fill(self.forbidden, -torch.inf))
        if self.holds_back and self.held_back is not None:
            row = _unless_empty(row, row.index_fill(0, self.held_back, -torch.inf))
        if self.sampling.bad_words:
            row = _unless_empty(row, self._without_bad_words(row, copies))
        if self.bias_ids is not None and self.bias_values is not None:
            row = row.index_add(0, self.bias_ids, self.bias_values)
        return row

    def _without_bad_words(self, row: torch.Tensor, copies: Copies) -> torch.Tensor:
        banned = [
            word[-1]
            for word in self.sampling.bad_words
            if len(word) == 1 or self.recent[-(len(word) - 1) :] == word[:-1]
        ]
        if not banned:
            return row
        return row.index_fill(0, copies.send(torch.tensor(banned)), -torch.inf)

    def append(self, token: int) -> None:
        self.num_output += 1
        if self.sampling.bad_words:
            self.recent = [*self.recent, token][-_longest(self.sampling.bad_words) :]
        if self.follower is not None:
            self.follower.advance(token)
        if self.seen is not None:
            self.seen[token] = True
        if self.counts is not None:
            self.counts[token] += 1


def _unless_empty(row: torch.Tensor, fewer: torch.Tensor) -> torch.Tensor:
    """Return `fewer` (`row` with more tokens masked), or `row` where that would leave no token.

    So grammars and settings always leave a token, and no request can end a step that others share.
    """
    return torch.where(fewer.isneginf().all(), row, fewer)


def _longest(words: Sequence[Sequence[int]]) -> int:
    return max(len(word) for word in words)


def _logprobs(
    logits: torch.Tensor, tokens: list[int], sequences: list[_Sequence]
) -> dict[int, TokenLogprobs]:
    asked = {
        row: sequence.sampling.num_logprobs
        for row, sequence in enumerate(sequences)
        if sequence.sampling.num_logprobs is not None
    }
    if not asked:
        return {}
    rows = list(asked)
    results = token_logprobs(logits[rows], [tokens[row] for row in rows], list(asked.values()))
    return dict(zip(rows, results, strict=True))
