"""Token masks from grammars. Owns the compiled grammars, which are shared, and each sequence's
position in its own (one `Follower` for each sequence, dropped with it).

A grammar is compiled when its request comes, before any step waits for it. Nothing is kept between
workers: a follower is rebuilt from the grammar and the output tokens. A thread computes the next
mask while the model runs the next step, so it costs the step nothing unless it takes longer than
the forward pass. The API server decides which grammars are valid.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from enum import Enum

import llguidance
import torch

from mooncake.base import Grammar, InternalError, MooncakeError
from mooncake.base.bounded_map import BoundedMap, SizedMap
from mooncake.model.grammars.grammar_jobs import GrammarJobs, Job, TookTooLong
from mooncake.model.grammars.grammar_tokens import GrammarTokens, bits_of, num_bytes

MAX_COMPILED_BYTES = 1 << 30
"""The memory bound of the compiled grammars that are kept, those used last. Most compile in about a
millisecond.
"""
COMPILED_BYTES_A_CHAR = 300
MIN_COMPILED_BYTES = 1 << 18
"""The least estimated memory of one compiled grammar, measured with schemas of 10 to 9,000
properties.
"""
MAX_TOO_COSTLY = 256
MAX_PREPARING = 64
MAX_REASON_CHARS = 200
"""How many of the library's words an error shows."""
NUM_THREADS = 2
"""The number of threads that compute the masks of all sequences. The library releases the
interpreter lock meanwhile.
"""
MASK_LIMIT_S = 3.0
"""The time limit for compiling a grammar and its first mask, or for one later mask, because a step
waits for it. Real schemas take milliseconds; the largest ones allowed take half a second.
"""


class Grammars:
    """Compiles grammars over one vocabulary. All runners of a process share it."""

    def __init__(
        self, vocab_size: int, load: Callable[[], GrammarTokens], limit_s: float = MASK_LIMIT_S
    ) -> None:
        """Start the threads.

        load: is called by `read_vocabulary`, or with the first grammar. limit_s: the longest time
        that one mask may take.
        """
        self._vocab_size = vocab_size
        self._load = load
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: SizedMap[str, llguidance.LLMatcher] = SizedMap(
            MAX_COMPILED_BYTES,
            lambda text: MIN_COMPILED_BYTES + len(text) * COMPILED_BYTES_A_CHAR,
        )
        self._jobs = GrammarJobs(NUM_THREADS, limit_s, "grammar")
        self._early = GrammarJobs(1, limit_s, "grammar-early")
        self._preparing: set[str] = set()
        self._too_costly: BoundedMap[bytes, None] = BoundedMap(MAX_TOO_COSTLY)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def num_compiled_bytes(self) -> int:
        """An estimate of the memory of the compiled grammars that are kept."""
        return self._compiled.size

    def close(self) -> None:
        """End the threads, once all that they were given is done."""
        self._jobs.close()
        self._early.close()

    def read_vocabulary(self) -> None:
        """Read the vocabulary now, so that the first grammar need not wait: with 160,000 tokens the
        library holds Python's lock for about a second. The first grammar reports any error in it.
        """
        with contextlib.suppress(Exception):
            self._vocabulary()

    def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar that comes soon, on a thread for which no mask waits. If that thread
        has too much to do, the first step compiles it.
        """
        text = grammar.text
        with self._lock:
            wanted = text not in self._compiled and text not in self._preparing
            if not wanted or len(self._preparing) >= MAX_PREPARING:
                return
            self._preparing.add(text)
        self._early.submit(functools.partial(self._prepare, text))

    def _prepare(self, text: str) -> None:
        try:
            self.matcher(text).compute_bitmask()  # copies share what is cached here
        except MooncakeError:
            pass  # whoever follows it reports the error
        finally:
            with self._lock:
                self._preparing.remove(text)

    def _vocabulary(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._load(), self._vocab_size)
            return self._tokenizer

    def follow(self, grammar: Grammar, output_tokens: Sequence[int]) -> Follower:
        """Return a follower of `grammar` after `output_tokens`. Never blocks."""
        return Follower(grammar, output_tokens, self, self._jobs)

    def refuse(self, text: str) -> None:
        """Remember that the grammar `text` exceeded its time, so that it is not tried again."""
        with self._lock:
            self._too_costly[_digest(text)] = None

    def matcher(self, text: str) -> llguidance.LLMatcher:
        """Return a fresh matcher of the grammar `text`. The pool's threads call this.

        Raises:
            InternalError: the grammar does not compile or has exceeded its time before, or the
                vocabulary cannot be read.
        """
        with self._lock:
            if self._too_costly and _digest(text) in self._too_costly:
                raise InternalError("the grammar has exceeded its time before")
            known = self._compiled.use(text)
            if known is not None:
                return known.deep_copy()
        made = llguidance.LLMatcher(
            self._vocabulary(), llguidance.LLMatcher.grammar_from_lark(text), log_level=0
        )
        if made.is_error():
            raise InternalError(f"the grammar does not compile: {_first_line(made.get_error())}")
        with self._lock:
            self._compiled[text] = made
        return made.deep_copy()


class _State(Enum):
    FIRST = "first"
    """There is no output yet, and the first token may open a think block."""
    FREE = "free"
    BOUND = "bound"
    ENDED = "ended"


class Follower:
    """One sequence's position in its grammar.

        FIRST ──<think>──► FREE ──trigger, </think>──► BOUND ──end token──► ENDED
          └────────────any other───────────────────────► │
    Only one job runs at a time, so the matcher needs no lock.
    """

    def __init__(
        self,
        grammar: Grammar,
        output_tokens: Sequence[int],
        grammars: Grammars,
        jobs: GrammarJobs,
    ) -> None:
        self._grammar = grammar
        self._grammars = grammars
        self._jobs = jobs
        self._matcher: llguidance.LLMatcher | None = None
        self._ends = [token for token in grammar.end_ids if 0 <= token < grammars.vocab_size]
        self._end_bits = bits_of(self._ends, grammars.vocab_size)
        self._triggers = frozenset(grammar.triggers)
        if grammar.free:
            self._state = _State.FREE
        else:
            self._state = _State.BOUND if grammar.think_begin is None else _State.FIRST
        self._job: Job[torch.Tensor | None] = self._submit(list(output_tokens))

    def allowed(self) -> torch.Tensor | None:
        """Return the tokens that may come next in the form of `bits_of`, or None if all may. Waits
        for the mask.

        Raises:
            InternalError: the grammar is broken, or its mask takes longer than the limit.
        """
        try:
            return self._jobs.wait(self._job)
        except TookTooLong:
            self._grammars.refuse(self._grammar.text)
            raise

    def advance(self, token: int) -> None:
        """Take the sampled token and begin to compute the next mask; call `allowed` before."""
        free = self._state is _State.FREE and token not in self._triggers
        if free and token != self._grammar.think_end:
            return  # the mask of free text does not change
        self._job = self._submit([token])

    def _submit(self, tokens: Sequence[int]) -> Job[torch.Tensor | None]:
        return self._jobs.submit(functools.partial(self._work, tokens))

    def _work(self, tokens: Sequence[int]) -> torch.Tensor | None:
        try:
            for token in tokens:
                self._take(token)
            return self._mask()
        except MooncakeError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise InternalError(f"the grammar cannot be followed: {_first_line(error)}") from error

    def _take(self, token: int) -> None:
        grammar = self._grammar
        if self._state is _State.FIRST and token == grammar.think_begin:
            self._state = _State.FREE
        elif self._state is _State.FREE:
            if token in self._triggers:
                self._state = _State.BOUND
                self._consume(token)
            elif token == grammar.think_end:
                self._state = _State.BOUND
        elif self._state is not _State.ENDED:
            self._state = _State.BOUND
            if token in self._ends and self._bound().is_accepting():
                self._state = _State.ENDED
            else:
                self._consume(token)

    def _consume(self, token: int) -> None:
        if not self._bound().consume_token(token):
            problem = _first_line(self._bound().get_error())
            raise InternalError(f"the grammar cannot be followed at token {token}: {problem}")

    def _bound(self) -> llguidance.LLMatcher:
        if self._matcher is None:
            self._matcher = self._grammars.matcher(self._grammar.text)
        return self._matcher

    def _mask(self) -> torch.Tensor | None:
        if self._state is _State.FREE:
            return None if self._grammar.optional else ~self._end_bits  # it must not end yet
        if self._state is _State.ENDED:
            return self._end_bits
        matcher = self._bound()
        bits = bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            problem = _first_line(matcher.get_error())
            raise InternalError(f"the grammar cannot be followed: {problem}")
        size = self._grammars.vocab_size
        allowed = torch.frombuffer(bits, dtype=torch.uint8)[: num_bytes(size)]
        allowed = allowed | self._end_bits if matcher.is_accepting() else allowed & ~self._end_bits
        if self._state is _State.FIRST and self._grammar.think_begin is not None:
            allowed |= bits_of([self._grammar.think_begin], size)
        return allowed


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def _first_line(problem: object) -> str:
    """Return the first line of an error, because the library may add all its tokens or a
    backtrace.
    """
    lines = str(problem).splitlines()
    return lines[0][:MAX_REASON_CHARS] if lines else "no reason given"


class _Tokens:
    """A vocabulary in the form the library asks for. Added tokens match no text, only their id."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarTokens, size: int) -> None:
        table = vocabulary.table[:size]
        table += [b""] * (size - len(table))
        # The library puts one end token into its masks. Ours are many and differ by request
        # (`Grammar.end_ids`), so it gets one past the vocabulary, which no mask of ours shows.
        self.eos_token_id = size
        self.tokens = [*table, b"<end>"]
        self.special_token_ids = [*(i for i in vocabulary.added if i < size), size]
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text. Where only one text can follow, the library allows only
        these tokens, so the model sees the text cut as in training.
        """
        return self._encode(text)


def _tokenizer(vocabulary: GrammarTokens, size: int) -> llguidance.LLTokenizer:
    wrapper = llguidance.TokenizerWrapper(_Tokens(vocabulary, size))
    return llguidance.LLTokenizer(wrapper, n_vocab=size + 1)
