"""Changes inputs: bits, lengths, splices, words of the format, and the values in JSON and msgpack.

Pure; all chance comes from the `Random` that is passed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from tests.support.fuzz.target import Shape, Target, framed, frames_of

NUMBERS = (
    0, 1, -1, 2, 7, 8, 15, 16, 127, 128, 255, 256, 1023, 1024, 4095, 4096, 16384, 32767, 65535,
    65536, 2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63,
    2**64 - 1, -(2**31), -(2**63),
)  # fmt: skip
_JSON_NUMBERS = (
    b"1e999", b"-1e999", b"NaN", b"Infinity", b"1e-999", b"-0", b"0.1", b"1" * 400, b"9" * 4400,
)  # fmt: skip
_WORDS = (
    "",
    "\0",
    "a",
    "\ud800",
    "é",
    "🙂",
    "../x",
    "a" * 300,
    "null",
    "__metadata__",
    "\r\n",
    "<",
)
MAX_TREE_BYTES = 65_536
"""Longer inputs are mutated as bytes only: reading them as a tree each time costs too much."""

Change = Callable[[Random, bytes], bytes]


def _at(random: Random, data: bytes) -> int:
    return random.randrange(len(data) + 1)


def _slice(random: Random, data: bytes) -> tuple[int, int]:
    begin = _at(random, data)
    length = min(len(data) - begin, random.choice((1, 2, 4, 8, 16, 64, 256, 4096)))
    return begin, begin + random.randint(0, length)


def flip(random: Random, data: bytes) -> bytes:
    """Flip one bit."""
    if not data:
        return data
    changed = bytearray(data)
    changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


def overwrite(random: Random, data: bytes) -> bytes:
    """Put a number, as one of the formats writes it, over what is there."""
    width = random.choice((1, 2, 4, 8))
    value = random.choice(NUMBERS) % 2 ** (8 * width)
    number = value.to_bytes(width, random.choice(("little", "big")))
    at = _at(random, data)
    return data[:at] + number + data[at + width :]


def cut(random: Random, data: bytes) -> bytes:
    """Drop the end."""
    return data[: _at(random, data)]


def drop(random: Random, data: bytes) -> bytes:
    """Drop a piece."""
    begin, end = _slice(random, data)
    return data[:begin] + data[end:]


def repeat(random: Random, data: bytes) -> bytes:
    """Repeat a piece, at times very often."""
    begin, end = _slice(random, data)
    times = random.choice((1, 2, 3, 10, 100, 1000, 100_000))
    return data[:end] + data[begin:end] * times + data[end:]


def noise(random: Random, data: bytes) -> bytes:
    """Put in random bytes."""
    at = _at(random, data)
    return data[:at] + random.randbytes(random.choice((1, 2, 4, 16))) + data[at:]


_PLAIN: tuple[Change, ...] = (flip, flip, overwrite, overwrite, cut, drop, repeat, noise)


class Mutator:
    """Makes new inputs of those that are known."""

    def __init__(self, random: Random, target: type[Target]) -> None:
        self._random = random
        self._shape = target.shape
        self._skip = target.skip
        self._tokens = target.tokens
        self._max_bytes = target.max_bytes

    def mutate(self, corpus: Sequence[bytes]) -> bytes:
        """Return a new input, made of one or two of `corpus`."""
        random = self._random
        data = random.choice(corpus)
        for _ in range(random.choice((1, 1, 1, 2, 2, 4, 8))):
            chance = random.random()
            if chance < 0.15 and self._tokens:
                data = self._with_token(data)
            elif chance < 0.25:
                data = self._spliced(data, random.choice(corpus))
            elif chance < 0.65 and len(data) <= MAX_TREE_BYTES:
                data = self._reshaped(data)
            else:
                data = random.choice(_PLAIN)(random, data)
            data = data[: self._max_bytes]
        return data

    def _with_token(self, data: bytes) -> bytes:
        at = _at(self._random, data)
        _, end = (at, at) if self._random.random() < 0.5 else _slice(self._random, data)
        return data[:at] + self._random.choice(self._tokens) + data[max(at, end) :]

    def _spliced(self, data: bytes, other: bytes) -> bytes:
        random = self._random
        if random.random() < 0.5:
            return data[: _at(random, data)] + other[_at(random, other) :]
        begin, end = _slice(random, other)
        at = _at(random, data)
        return data[:at] + other[begin:end] + data[at:]

    def _reshaped(self, data: bytes) -> bytes:
        if self._shape is Shape.JSON:
            return self._json(data)
        if self._shape is Shape.MSGPACK:
            return self._msgpack(data, self._skip)
        if self._shape is Shape.FRAMES:
            return self._frames(data)
        return self._random.choice(_PLAIN)(self._random, data)

    def _json(self, data: bytes) -> bytes:
        try:
            tree = json.loads(data[self._skip :])
            text = json.dumps(self._changed(tree), ensure_ascii=self._random.random() < 0.5)
        except (ValueError, RecursionError):
            return self._random.choice(_PLAIN)(self._random, data)
        made = text.encode("utf-8", "replace")
        if self._random.random() < 0.1:
            made = made.replace(b": 1", b": " + self._random.choice(_JSON_NUMBERS), 1)
        return data[: self._skip] + made

    def _msgpack(self, data: bytes, skip: int) -> bytes:
        try:
            tree = msgspec.msgpack.decode(data[skip:])
            return data[:skip] + msgspec.msgpack.encode(self._changed(tree))
        except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError, TypeError):
            return self._random.choice(_PLAIN)(self._random, data)

    def _frames(self, data: bytes) -> bytes:
        random = self._random
        bodies = frames_of(data[1:])
        if not bodies:
            return random.choice(_PLAIN)(random, data)
        which = random.randrange(len(bodies))
        chance = random.random()
        if chance < 0.2:
            bodies.insert(random.randrange(len(bodies) + 1), bodies[which])
        elif chance < 0.3:
            del bodies[which]
        elif chance < 0.8:
            bodies[which] = self._msgpack(bodies[which], skip=0)
        else:
            bodies[which] = random.choice(_PLAIN)(random, bodies[which])
        return data[:1] + framed(bodies)

    def _changed(self, tree: Any) -> Any:
        """Return `tree` with one change somewhere in it."""
        random = self._random
        if isinstance(tree, dict) and tree and random.random() < 0.75:
            key = random.choice(list(tree))
            chance = random.random()
            if chance < 0.1:
                return {name: value for name, value in tree.items() if name != key}
            if chance < 0.2:
                return {**tree, random.choice([*_WORDS, *self._words()]): tree[key]}
            if chance < 0.25:
                return {**tree, key: tree}
            return {**tree, key: self._changed(tree[key])}
        if isinstance(tree, list) and tree and random.random() < 0.75:
            which = random.randrange(len(tree))
            chance = random.random()
            if chance < 0.1:
                return tree[:which] + tree[which + 1 :]
            if chance < 0.2:
                return tree + [tree[which]] * random.choice((1, 10, 1000))
            return [*tree[:which], self._changed(tree[which]), *tree[which + 1 :]]
        return self._value(tree)

    def _words(self) -> list[str]:
        return [token.decode("utf-8", "replace") for token in self._tokens]

    def _value(self, old: Any) -> Any:
        random = self._random
        chance = random.random()
        if chance < 0.25:
            return random.choice(NUMBERS)
        if chance < 0.45:
            return random.choice([*_WORDS, *self._words()])
        if chance < 0.55:
            return random.choice((None, True, False, [], {}, 0.5, -1.5e300))
        if chance < 0.65:
            return [old] * random.choice((1, 2, 100))
        if chance < 0.75:
            return {random.choice([*_WORDS, *self._words()]): old}
        if chance < 0.85:
            for _ in range(random.choice((5, 50, 500))):
                old = [old] if random.random() < 0.9 else {"a": old}
            return old
        if isinstance(old, str):
            text = old.encode("utf-8", "replace")
            return random.choice(_PLAIN)(random, text)[:4096].decode("utf-8", "replace")
        if isinstance(old, bytes):
            return random.choice(_PLAIN)(random, old)[:4096]
        if isinstance(old, int):
            return old + random.choice((-1, 1, 64, 2**32))
        return random.choice(NUMBERS)
