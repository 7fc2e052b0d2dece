"""A runner without a model: KV bytes and tokens are hashes of the token history, in real pages.

The KV row of one token in one layer is a function of (layer, tokens up to and including it). A
sampled token is a function of every KV byte read from the sequence's pages, the seed and the output
position. So a wrong page, a page reused too early or a torn transfer gives wrong tokens, and with
`strict` an AssertionError that says where.

Steps run only when `poll` is called: the pages are read and written then, not at `submit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b, shake_128

from mooncake.base.blocks import pack_tokens
from mooncake.base.kv_layout import KvLayout
from mooncake.base.request import GenerateRequest, Grammar, SamplingParams, TokenLogprobs
from mooncake.engine.plan import (
    LayerDone,
    RunnerEvent,
    StepPlan,
    StepResult,
    StepSlot,
)
from mooncake.engine.sequence import Sequence as Running

VOCAB_SIZE = 97


def small_layout(
    *, num_layers: int = 2, block_tokens: int = 4, kv_width: int = 8, fingerprint: str = "fake"
) -> KvLayout:
    """Return a layout with little pages, for tests."""
    return KvLayout(
        num_layers=num_layers,
        block_tokens=block_tokens,
        kv_width=kv_width,
        dtype="float8_e4m3fn",
        fingerprint=fingerprint,
    )


class History:
    """The KV that some tokens must have, grown token by token."""

    def __init__(self, layout: KvLayout, tokens: Sequence[int] = ()) -> None:
        self._row_bytes = layout.slice_bytes // layout.block_tokens
        self._slice_bytes = layout.slice_bytes
        self._digest = blake2b(layout.fingerprint.encode(), digest_size=16).digest()
        self.tokens: list[int] = []
        self.kv = [bytearray() for _ in range(layout.num_layers)]
        """The rows of all tokens, one after the other, for each layer."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self._digest = blake2b(self._digest + token.to_bytes(4, "little"), digest_size=16).digest()
        for layer in range(len(self.kv)):
            self.kv[layer] += shake_128(self._digest + layer.to_bytes(2, "little")).digest(
                self._row_bytes
            )

    def branch(self, tokens: Sequence[int]) -> list[list[bytes]]:
        """Return for each layer the rows that `tokens` would have if they came next."""
        digest, found = self._digest, [[] for _ in self.kv]
        for token in tokens:
            digest = blake2b(digest + token.to_bytes(4, "little"), digest_size=16).digest()
            for layer, rows in enumerate(found):
                rows.append(shake_128(digest + layer.to_bytes(2, "little")).digest(self._row_bytes))
        return found

    def rows(self, layer: int, start: int, stop: int) -> bytes:
        """Return the rows of the tokens at [start, stop)."""
        return bytes(self.kv[layer][start * self._row_bytes : stop * self._row_bytes])

    def slice(self, layer: int, index: int) -> bytes:
        """Return what block `index` holds in `layer`: shorter than a slice where tokens end."""
        return bytes(self.kv[layer][index * self._slice_bytes : (index + 1) * self._slice_bytes])


def choose_token(
    kv: Sequence[bytes | bytearray], sampling: SamplingParams, position: int, vocab_size: int
) -> int:
    """Return the token "sampled" after the tokens whose KV (per layer) is `kv`; `position` counts
    the output tokens before it.
    """
    state = blake2b(digest_size=8)
    for rows in kv:
        state.update(rows)
    state.update(sampling.seed.to_bytes(8, "little") + position.to_bytes(4, "little"))
    token = int.from_bytes(state.digest(), "little") % vocab_size
    while position < sampling.min_tokens and token in sampling.stop_token_ids:
        token = (token + 1) % vocab_size
    return token


def expected_output(
    layout: KvLayout,
    request: GenerateRequest,
    *,
    max_model_len: int = 1 << 30,
    vocab_size: int = VOCAB_SIZE,
) -> list[int]:
    """Return the output tokens that `request` must get, however it is scheduled: the oracle."""
    history = History(layout, request.prompt_tokens.tolist())
    sampling = request.sampling
    outputs: list[int] = []
    while len(outputs) < sampling.max_tokens and len(history.tokens) < max_model_len:
        token = choose_token(history.kv, sampling, len(outputs), vocab_size)
        outputs.append(token)
        history.append(token)
        if token in sampling.stop_token_ids and len(outputs) > sampling.min_tokens:
            break
    return outputs


def sequence_of(
    sequence_id: int,
    sampling: SamplingParams,
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int] = (),
) -> Running:
    """Return a sequence with these tokens, as a plan brings it to a runner."""
    request = GenerateRequest(request_id="r", prompt=pack_tokens(prompt_tokens), sampling=sampling)
    return Running(sequence_id, request, output_tokens=list(output_tokens))


class _State:
    """What the runner keeps of a sequence."""

    def __init__(self, layout: KvLayout, start: Running) -> None:
        self.sampling = start.request.sampling
        self.num_prompt_tokens = len(start.prompt_tokens)
        self.history = History(layout, [*start.prompt_tokens, *start.output_tokens])
        self.pages: list[int] = []
        self.spoiled = False
        """A step of it failed: further ones that were begun by then compute over rubbish."""


class FakeRunner:
    """An `engine.plan.Runner` with pages in `memory`, `[layers, pages, block_tokens, width]`.

    `memory` is a region of a transfer engine, or left out for memory of its own. Assertions hold
    the engine to the rules of `engine.plan`.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_pages: int,
        *,
        memory: memoryview | None = None,
        vocab_size: int = VOCAB_SIZE,
        strict: bool = True,
    ) -> None:
        num_bytes = layout.num_layers * num_pages * layout.slice_bytes
        self.memory = memory if memory is not None else memoryview(bytearray(num_bytes))
        assert self.memory.nbytes >= num_bytes, "the memory is too small for the pages"
        self._layout = layout
        self._num_pages = num_pages
        self._vocab_size = vocab_size
        self._strict = strict
        self._states: dict[int, _State] = {}
        self._steps: deque[Iterator[RunnerEvent]] = deque()
        self._errors: deque[str] = deque()
        self.prepared: list[Grammar] = []
        self.plans: list[StepPlan] = []
        """All that were submitted, oldest first."""

    # ------------------------------------------------------------ Runner

    def prepare(self, grammar: Grammar) -> None:
        self.prepared.append(grammar)

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._steps.append(self._run(plan))

    def poll(self, limit: int | None = None) -> list[RunnerEvent]:
        """Run what was submitted and return its events; with `limit`, stop after that many."""
        events: list[RunnerEvent] = []
        while self._steps and (limit is None or len(events) < limit):
            event = next(self._steps[0], None)
            if event is None:
                self._steps.popleft()
            else:
                events.append(event)
                if isinstance(event, StepResult):
                    self._steps.popleft()
        return events

    @property
    def num_steps(self) -> int:
        """Steps submitted and not ended."""
        return len(self._steps)

    @property
    def known_ids(self) -> list[int]:
        """Sequences the runner remembers."""
        return sorted(self._states)

    def close(self) -> None:
        self._steps.clear()

    def fail_next(self, error: str) -> None:
        """Let the next step that is run (and not failing already) fail after writing rubbish."""
        self._errors.append(error)

    # ------------------------------------------------------------ looking at pages

    def page_slice(self, layer: int, page: int) -> memoryview:
        """Return the bytes of one page in one layer, writable."""
        assert 0 <= page < self._num_pages, f"there is no page {page}"
        size = self._layout.slice_bytes
        start = (layer * self._num_pages + page) * size
        return self.memory[start : start + size]

    def read(self, layer: int, pages: Sequence[int], num_tokens: int) -> bytes:
        """Return the rows of the first `num_tokens` tokens kept in `pages`."""
        row_bytes = self._layout.slice_bytes // self._layout.block_tokens
        data = b"".join(self.page_slice(layer, page) for page in pages)
        return data[: num_tokens * row_bytes]

    def check(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Raise AssertionError unless `pages` hold the KV of `tokens` in every layer."""
        self._compare(pages, History(self._layout, tokens), len(tokens), "pages")

    # ------------------------------------------------------------ inside

    def _run(self, plan: StepPlan) -> Iterator[RunnerEvent]:
        error = self._errors.popleft() if self._errors else None
        self._learn(plan)
        for layer in range(self._layout.num_layers):
            for slot in plan.slots:
                self._write(layer, slot, rubbish=error is not None)
                self._states[slot.sequence_id].spoiled |= error is not None
            if plan.report_layers and error is None:
                yield LayerDone(step_id=plan.step_id, layer=layer)
        tokens, logprobs, prompt_logprobs = {}, {}, {}
        if error is None:
            for slot in plan.slots:
                if slot.sample:
                    made = tokens[slot.sequence_id] = list(self._sampled(slot))
                    num = self._states[slot.sequence_id].sampling.num_logprobs
                    if num is not None:
                        logprobs[slot.sequence_id] = [fake_logprobs(token, num) for token in made]
                if self._states[slot.sequence_id].sampling.num_prompt_logprobs is not None:
                    prompt_logprobs[slot.sequence_id] = self._prompt_logprobs(slot)
        yield StepResult(
            step_id=plan.step_id,
            tokens=tokens,
            logprobs=logprobs,
            seconds=0.01 + 0.001 * plan.num_tokens,
            prompt_logprobs=prompt_logprobs,
            error=error,
        )

    def _learn(self, plan: StepPlan) -> None:
        """Take over what the plan says of sequences, and hold it to its own rules."""
        assert plan.slots, "a step computes something"
        for sequence_id in plan.ended:
            assert sequence_id in self._states, f"{sequence_id} ended and was never started"
            del self._states[sequence_id]
        for start in plan.starts:
            assert start.sequence_id not in self._states, f"{start.sequence_id} started twice"
            self._states[start.sequence_id] = _State(self._layout, start)
        writable: set[int] = set()
        for slot in plan.slots:
            name = f"step {plan.step_id}, sequence {slot.sequence_id}"
            state = self._states[slot.sequence_id]
            known = state.history
            stop = slot.start + len(slot.tokens)
            assert slot.tokens, f"{name}: nothing to compute"
            end = stop - slot.num_drafts
            own = slot.tokens[: end - slot.start]
            assert own == known.tokens[slot.start : end], f"{name}: other tokens"
            assert slot.sample == (end == len(known.tokens)), f"{name}: sample is {slot.sample}"
            assert slot.sample or not slot.num_drafts, f"{name}: drafts where nothing is sampled"
            room = state.sampling.max_tokens - (end - state.num_prompt_tokens)
            assert slot.num_drafts < max(1, room), f"{name}: a draft that cannot be accepted"
            assert len(slot.pages) * self._layout.block_tokens >= stop, f"{name}: too few pages"
            assert len(set(slot.pages)) == len(slot.pages), f"{name}: a page twice"
            assert slot.pages[: len(state.pages)] == state.pages, f"{name}: other pages"
            state.pages = list(slot.pages)
            written = set(slot.pages[slot.start // self._layout.block_tokens :])
            assert not written & writable, f"{name}: writes to another's page"
            writable |= written
            if self._strict and not state.spoiled:
                self._compare(slot.pages, known, slot.start, name)
        assert len({slot.sequence_id for slot in plan.slots}) == len(plan.slots)

    def _compare(self, pages: Sequence[int], history: History, stop: int, name: str) -> None:
        for layer in range(self._layout.num_layers):
            if self.read(layer, pages, stop) == history.rows(layer, 0, stop):
                continue
            for index, page in enumerate(pages):
                first = index * self._layout.block_tokens
                rows = history.rows(layer, first, min(stop, first + self._layout.block_tokens))
                held = bytes(self.page_slice(layer, page)[: len(rows)])
                assert held == rows, f"{name}: block {index} is not in page {page}, layer {layer}"
            raise AssertionError(f"{name}: {len(pages)} pages do not hold {stop} tokens")

    def _write(self, layer: int, slot: StepSlot, *, rubbish: bool) -> None:
        history = self._states[slot.sequence_id].history
        block_tokens = self._layout.block_tokens
        row_bytes = self._layout.slice_bytes // block_tokens
        end = slot.start + len(slot.tokens) - slot.num_drafts
        rows = [history.rows(layer, at, at + 1) for at in range(slot.start, end)]
        rows += history.branch(slot.drafts)[layer]
        for position, row in enumerate(rows, slot.start):
            target = self.page_slice(layer, slot.pages[position // block_tokens])
            at = position % block_tokens * row_bytes
            target[at : at + row_bytes] = b"\xff" * row_bytes if rubbish else row

    def _sampled(self, slot: StepSlot) -> Iterator[int]:
        """Yield what is sampled after the last token, and after each draft that is right."""
        end = slot.start + len(slot.tokens) - slot.num_drafts
        for num_tokens, draft in enumerate((*slot.drafts, None), end):
            token = self._sample(slot, num_tokens)
            yield token
            if token != draft:
                return

    def _sample(self, slot: StepSlot, num_tokens: int) -> int:
        state = self._states[slot.sequence_id]
        kv = [self.read(layer, slot.pages, num_tokens) for layer in range(self._layout.num_layers)]
        position = num_tokens - state.num_prompt_tokens
        token = choose_token(kv, state.sampling, position, self._vocab_size)
        state.history.append(token)
        return token

    def _prompt_logprobs(self, slot: StepSlot) -> list[TokenLogprobs]:
        state = self._states[slot.sequence_id]
        stop = min(slot.start + len(slot.tokens) + 1, state.num_prompt_tokens)
        return [fake_logprobs(token, 0) for token in state.history.tokens[slot.start + 1 : stop]]


def fake_logprobs(token: int, num_top: int) -> TokenLogprobs:
    """Return log-probabilities that are recognisable as those of `token`."""
    top = [(token + index, -0.5 - index) for index in range(num_top)]
    return TokenLogprobs(logprob=-float(token), rank=token + 1, top=top)
