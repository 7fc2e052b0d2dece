"""Turns tokens into an answer as they arrive: into text (`Detokenizer`), up to a stop string
(`StopMatcher`), cut into reasoning, content and tool calls, as Kimi-K2 marks them
(`MessageParser`). `Delta` holds the additions to one choice, from which replies and streams are
made.

There is one object of each class for each choice, with constant work for each token. The answer
does not depend on how the tokens were grouped. The parser works on the token ids of the markers,
never on their spelling, which is text.

    content ──<think>──► reasoning ──</think>──► content
       └───────────┬─────────┘
           section begin ──► between ──call begin──► id ──argument begin──► arguments
                                └──────◄── call end ──────────────────────────┘
    A section ends reasoning too: the model may call tools inside an unfinished think block.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import msgspec

from mooncake.api.schema.replies import SchemaError
from mooncake.api.text.tokenizer import Tokenizer
from mooncake.base import TokenLogprobs

PREFILL_WINDOW = 3
"""If a template opens a think block, its marker is among this many last tokens of the prompt."""
_ENTRY_BYTES = 16
"""Bytes of one encoded log-probability of a prompt."""


class Detokenizer:
    """The text of one growing token sequence.

    A character whose bytes are spread over several tokens appears with the last of them. Bytes that
    cannot become UTF-8 appear as U+FFFD; an unfinished character at the very end does not appear.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token; often "" or one word."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def cut(self) -> None:
        """Drop an unfinished character: another text follows."""
        self._decoder.reset()


class StopMatcher:
    """Looks for stop strings in a growing text and decides which part may be shown.

    The stop string that is complete first is chosen; if several are complete at one character, the
    longest. Each has a Knuth-Morris-Pratt automaton, so nothing is scanned twice.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string that ended it or None."""
        if not self._stops:
            return text, None
        buffer = self._held + text
        for at in range(len(self._held), len(buffer)):
            stop = self._advance(buffer[at])
            if stop is not None:
                self._held = ""
                end = at + 1
                return buffer[: end if self._include else end - len(stop)], stop
        shown = len(buffer) - max(self._states)
        self._held = buffer[shown:]
        return buffer[:shown], None

    def flush(self) -> str:
        """Return the text that was held back, because the text has ended and nothing matched."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, letter: str) -> str | None:
        for which, stop in enumerate(self._stops):
            state = self._states[which]
            while state and stop[state] != letter:
                state = self._borders[which][state - 1]
            if stop[state] == letter:
                state += 1
            if state == len(stop):
                return stop
            self._states[which] = state
        return None


@functools.lru_cache(maxsize=256)
def _borders(pattern: str) -> Sequence[int]:
    """Return for each prefix of `pattern` the length of its longest proper border. The result is
    cached, because all choices of a call have the same stop strings: a thousand choices with 32 of
    them took seconds.
    """
    borders = [0] * len(pattern)
    length = 0
    for at in range(1, len(pattern)):
        while length and pattern[at] != pattern[length]:
            length = borders[length - 1]
        if pattern[at] == pattern[length]:
            length += 1
        borders[at] = length
    return borders


class Marker(str, Enum):
    """The special tokens that structure an answer, by their names in the checkpoint."""

    THINK_BEGIN = "<think>"
    THINK_END = "</think>"
    SECTION_BEGIN = "<|tool_calls_section_begin|>"
    SECTION_END = "<|tool_calls_section_end|>"
    CALL_BEGIN = "<|tool_call_begin|>"
    ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"
    CALL_END = "<|tool_call_end|>"


THINK_MARKERS = (Marker.THINK_BEGIN, Marker.THINK_END)
TOOL_MARKERS = tuple(marker for marker in Marker if marker not in THINK_MARKERS)


class Piece(msgspec.Struct):
    """What is added to an answer's text, to the reasoning before it, or to one call."""

    text: str = ""
    """The text, or the call's arguments."""
    is_reasoning: bool = False
    call: int | None = None
    """The number of the call; None: it belongs to none."""
    call_id: str | None = None
    name: str | None = None
    """`call_id` and `name` come once, with a call's first piece."""

    @property
    def holds(self) -> tuple[bool, int | None]:
        """What it is a piece of: neighbours of the same are one part of the answer."""
        return self.is_reasoning, self.call


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Join an answer's pieces if one continues another. Each text is copied once."""
    joiner = _Joiner()
    for piece in pieces:
        joiner.add(piece.text, piece.is_reasoning, piece.call, piece.call_id, piece.name)
    return joiner.take()


class _Joiner:
    """Pieces that grow at their end. The last one grows in parts, so that a token costs the same
    however long the answer is.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._parts: list[str] = []
        """The text of the last piece, once something was added to it."""

    def add(
        self,
        text: str,
        is_reasoning: bool = False,
        call: int | None = None,
        call_id: str | None = None,
        name: str | None = None,
    ) -> None:
        """Add to the last piece, or begin a piece: each `call_id` does."""
        last = self._pieces[-1] if self._pieces else None
        goes_on = last is not None and last.call == call and last.is_reasoning is is_reasoning
        if last is None or not goes_on or call_id is not None:
            self._end()
            self._pieces.append(Piece(text, is_reasoning, call, call_id, name))
            return
        if not self._parts:
            self._parts.append(last.text)
        self._parts.append(text)

    def take(self) -> list[Piece]:
        """Return the pieces since the last call."""
        self._end()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _end(self) -> None:
        if self._parts:
            self._pieces[-1].text = "".join(self._parts)
            self._parts.clear()


class _State(Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    BETWEEN = "between"
    ID = "id"
    ARGUMENTS = "arguments"


_IN_SECTION = (_State.BETWEEN, _State.ID, _State.ARGUMENTS)

_MOVES: dict[tuple[_State, Marker], _State] = {
    (_State.CONTENT, Marker.THINK_BEGIN): _State.REASONING,
    (_State.REASONING, Marker.THINK_END): _State.CONTENT,
    (_State.CONTENT, Marker.SECTION_BEGIN): _State.BETWEEN,
    (_State.REASONING, Marker.SECTION_BEGIN): _State.BETWEEN,
    **{(state, Marker.CALL_BEGIN): _State.ID for state in _State},
    **{(state, Marker.CALL_END): _State.BETWEEN for state in _IN_SECTION},
    **{(state, Marker.SECTION_END): _State.CONTENT for state in _IN_SECTION},
}


class MessageParser:
    """Takes text and markers in order and returns the pieces of the message in that order."""

    def __init__(
        self, markers: Mapping[int, Marker], *, reasoning_open: bool, max_calls: int | None
    ) -> None:
        self.markers = markers
        self.num_calls = 0
        self._max_calls = max_calls
        self._state = _State.REASONING if reasoning_open else _State.CONTENT
        self._id_text = ""
        self._call_ids: set[str] = set()
        self._arguments_seen = False
        self._joiner = _Joiner()
        self._run = 0
        self._run_has_text = False

    @property
    def reasoning(self) -> bool:
        """True if the model is thinking."""
        return self._state is _State.REASONING

    @property
    def run(self) -> int | None:
        """The run that text would belong to now; None inside reasoning and calls."""
        return self._run if self._state is _State.CONTENT else None

    @property
    def in_section(self) -> bool:
        """True if the model is in a section of tool calls, where stop strings do not apply."""
        return self._state in _IN_SECTION

    def text(self, text: str) -> None:
        """Take text between markers."""
        if not text:
            return
        state = self._state
        if state is _State.CONTENT:
            self._run_has_text = True
            self._joiner.add(text)
        elif state is _State.REASONING:
            self._end_run()
            self._joiner.add(text, is_reasoning=True)
        elif state is _State.ID:
            self._id_text += text
        elif state is _State.ARGUMENTS:
            self._add_arguments(text if self._arguments_seen else text.lstrip())
        # White space between calls has no meaning.

    def marker(self, marker: Marker) -> None:
        """Take a marker. A marker that makes no sense here is ignored."""
        if marker is Marker.ARGUMENT_BEGIN:
            if self._state is _State.ID:
                self._begin_call()
            return
        if marker in (Marker.CALL_BEGIN, Marker.CALL_END, Marker.SECTION_END):
            self._end_call()
            self._id_text = ""
        self._state = _MOVES.get((self._state, marker), self._state)

    def end(self) -> None:
        """Take the model's own end of the answer: an open call counts as complete."""
        self._end_call()

    def take(self) -> list[Piece]:
        """Return what is new since the last call. Neighbouring pieces differ in kind or in their
        call.
        """
        return self._joiner.take()

    def _begin_call(self) -> None:
        call_id = self._id_text.strip()
        name = function_name(call_id)
        if ":" not in call_id or call_id in self._call_ids:
            call_id = f"functions.{name}:{self.num_calls}"
        while call_id in self._call_ids:  # results are told apart by it
            call_id += "0"
        self._call_ids.add(call_id)
        self._state, self._arguments_seen = _State.ARGUMENTS, False
        self.num_calls += 1
        if self._kept:
            index = self.num_calls - 1
            self._end_run()
            self._joiner.add("", call=index, call_id=call_id, name=name)

    def _end_call(self) -> None:
        if self._state is _State.ARGUMENTS and not self._arguments_seen:
            self._add_arguments("{}")

    def _add_arguments(self, text: str) -> None:
        if not text:
            return
        self._arguments_seen = True
        if self._kept:
            self._joiner.add(text, call=self.num_calls - 1)

    def _end_run(self) -> None:
        self._run += self._run_has_text
        self._run_has_text = False

    @property
    def _kept(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls


def function_name(call_id: str) -> str:
    """Return the name in `functions.NAME:INDEX`; the name may itself have dots, dashes and colons,
    and either end may be missing (`search:2`)."""
    name = call_id.removeprefix("functions.")
    head, colon, index = name.rpartition(":")
    return head if colon and index.strip().isdecimal() else name


def find_markers(tokenizer: Tokenizer, wanted: Sequence[Marker]) -> dict[int, Marker]:
    """Return the ids of `wanted` in this tokenizer, or {} unless it has all of them."""
    ids = {tokenizer.special_id(marker.value): marker for marker in wanted}
    return {} if None in ids else {key: value for key, value in ids.items() if key is not None}


def reasoning_is_open(prompt_tokens: Sequence[int], markers: Mapping[int, Marker]) -> bool:
    """Return whether the prompt ends inside a think block that the template opened."""
    last = [markers[token] for token in prompt_tokens[-PREFILL_WINDOW:] if token in markers]
    return bool(last) and last[-1] is Marker.THINK_BEGIN


class Delta(msgspec.Struct, kw_only=True):
    """The additions to one choice since its last `Delta`."""

    index: int
    pieces: list[Piece] = []
    """Text, reasoning and tool calls in the model's order."""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """One entry for each of `tokens` if logprobs were asked for, else none."""
    runs: list[int | None] = []
    """The number of the run of text that the token of each of `logprobs` belongs to: reasoning and
    calls divide the answer's text into runs. None = reasoning, part of a call, a marker or the end.
    """
    prompt_logprobs: msgspec.Raw | None = None
    """Set in the first `Delta` of a prompt's first choice; `unpacked_logprobs` reads them."""
    finish_reason: str | None = None
    """"stop", "length" or "tool_calls" in the last one."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None at the model's own end of text."""
    schema_errors: list[SchemaError] = []
    """Set in the last one: where the answer violates a schema that its grammar does not follow as a
    whole.
    """

    @property
    def size(self) -> int:
        """Approximate number of tokens and log-probabilities: the cost of writing it."""
        num = len(self.tokens)
        if self.logprobs:
            num += len(self.logprobs) * (1 + len(self.logprobs[0].top))
        if self.prompt_logprobs is not None:
            num += len(memoryview(self.prompt_logprobs)) // _ENTRY_BYTES
        return num

    @property
    def text(self) -> str:
        """All text, without reasoning and tool calls."""
        return self._joined(is_reasoning=False)

    @property
    def reasoning(self) -> str:
        return self._joined(is_reasoning=True)

    @property
    def tool_calls(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.call is not None]

    def _joined(self, *, is_reasoning: bool) -> str:
        return "".join(
            [
                piece.text
                for piece in self.pieces
                if piece.call is None and piece.is_reasoning is is_reasoning
            ]
        )
