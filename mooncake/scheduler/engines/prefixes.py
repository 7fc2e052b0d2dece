"""What engines hold of prompts: by their block events, or else by what was sent to them. Pure.

A prompt is named twice. Its text has a chain of keys, one for each `PIECE_BYTES` bytes. Its tokens,
where they are known, have a chain of keys for each block size that an engine publishes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import NamedTuple

from mooncake.base.block_events.engine_events import (
    BlockName,
    ClearedBlocks,
    EngineEvent,
    RemovedBlocks,
    StoredBlocks,
)
from mooncake.base.blocks import BlockKey, chain_root, extend_chain, unpack_tokens
from mooncake.base.bounded_map import BoundedMap

PIECE_BYTES = 256
"""Bytes of a piece: about 64 tokens of a text, or 64 tokens of a prompt that is given as tokens."""
TOKEN_BYTES = 4
MAX_PIECES = 1 << 17
"""Pieces that are remembered of what was sent to an engine; the ones not used for longest go."""
MAX_PROMPT_BYTES = 2 << 20
"""What is behind this much of a text, or of packed tokens, does not decide where a prompt goes: its
keys would hold up all streams.
"""
MAX_BLOCKS = 1 << 19
"""Published blocks that are remembered of an engine; the oldest go."""
MAX_COPIES = 256
"""Copies that are remembered of one block: each costs time when one of them goes."""
COPIES = 4
"""Copies that are remembered of an engine, for each block that may be."""
MAX_SIZES = 16
"""Sizes of blocks that one engine may have: a prompt is hashed once for each."""
_TEXT, _TOKENS = "engines-text", "engines-tokens"


class Prompt:
    """A prompt as placement needs it."""

    def __init__(
        self, text: bytes, *, tokens: bytes | None = None, salt: str = "", model: str = ""
    ) -> None:
        """`text`: what of the request decides its tokens, from the first on. `tokens`: its packed
        tokens, if they are known. Prompts of different salts, or models, share nothing.
        """
        whole = memoryview(text)[:MAX_PROMPT_BYTES]
        root = chain_root(_TEXT, model, salt)
        self.pieces: Sequence[BlockKey] = extend_chain(root, whole, PIECE_BYTES // TOKEN_BYTES)
        self.is_salted = bool(salt)
        self._salt = salt
        self._tokens: bytes | None = None
        self._blocks: dict[int, list[BlockKey]] = {}
        self.num_tokens = max(1, len(text) // TOKEN_BYTES)
        """A guess until the tokens are known: one for each `TOKEN_BYTES` bytes."""
        if tokens is not None:
            self.take_tokens(tokens)

    @property
    def has_tokens(self) -> bool:
        """Whether the prompt's tokens are known."""
        return self._tokens is not None

    def take_tokens(self, tokens: bytes) -> None:
        """Take the prompt's packed tokens, which were not known before."""
        self._tokens = tokens
        self.num_tokens = max(1, len(tokens) // TOKEN_BYTES)

    def blocks(self, block_tokens: int) -> Sequence[BlockKey] | None:
        """Return the keys of the prompt's full blocks, or None if its tokens are not known."""
        if self._tokens is None:
            return None
        if block_tokens not in self._blocks:
            root = chain_root(_TOKENS, "", self._salt)
            tokens = unpack_tokens(self._tokens)[: MAX_PROMPT_BYTES // TOKEN_BYTES]
            self._blocks[block_tokens] = extend_chain(root, tokens, block_tokens)
        return self._blocks[block_tokens]


class SentPrefixes:
    """The prompts that were sent to one engine, by their text: those that it probably has, and
    those of requests that run there.
    """

    def __init__(self, max_pieces: int = MAX_PIECES) -> None:
        self._sent: BoundedMap[BlockKey, None] = BoundedMap(max_pieces)
        self._running: Counter[BlockKey] = Counter()

    def begin(self, prompt: Prompt) -> None:
        """Note that a request was sent."""
        for key in reversed(prompt.pieces):  # heads go last: chains break at their tails
            self._sent[key] = None
        self._running.update(prompt.pieces)

    def end(self, prompt: Prompt) -> None:
        """Note that a request has ended."""
        self._running.subtract(prompt.pieces)
        for key in prompt.pieces:
            if not self._running[key]:
                del self._running[key]

    def share(self, prompt: Prompt, *, of_running: bool = False) -> float:
        """Return which part of a prompt, from its begin on, was sent before; `of_running`: which
        part running requests have.
        """
        known: Container[BlockKey] = self._running if of_running else self._sent
        return _num_leading(prompt.pieces, known) / max(1, len(prompt.pieces))

    def forget(self) -> None:
        """Forget what was sent: the engine has lost it. Requests that run are still counted."""
        self._sent.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if more is remembered than may be."""
        assert len(self._sent) <= self._sent.bound
        assert all(count > 0 for count in self._running.values())


class _Copy(NamedTuple):
    """A copy of a block in one medium of one process, by that process's name for it."""

    source: Hashable
    name: BlockName
    medium: str | None
    group: int | None


class PublishedBlocks:
    """The blocks that one engine has published as stored, by the tokens in them."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._keys: OrderedDict[tuple[Hashable, BlockName], BlockKey] = OrderedDict()
        """The key of each block, by the process that names it and its name there."""
        self._copies: dict[BlockKey, set[_Copy]] = {}
        self._num_copies = 0
        self.sizes: set[int] = set()
        """Tokens of its blocks."""

    def __len__(self) -> int:
        return len(self._copies)

    def apply(self, source: Hashable, events: Iterable[EngineEvent]) -> None:
        """Take events of one of the engine's processes."""
        for event in events:
            if isinstance(event, StoredBlocks):
                self._store(source, event)
            elif isinstance(event, RemovedBlocks):
                self._remove(source, event)
            elif isinstance(event, ClearedBlocks):
                self.forget(source)
        most = COPIES * self._max_blocks
        while len(self._keys) > self._max_blocks or self._num_copies > most:
            self._drop(*next(iter(self._keys)))

    def forget(self, source: Hashable | None = None) -> None:
        """Forget what one process has published; None: what all have."""
        if source is None or all(owner == source for owner, _ in self._keys):
            self._keys.clear()
            self._copies.clear()
            self._num_copies = 0
            return
        for owner, name in list(self._keys):
            if owner == source:
                self._drop(owner, name)

    def num_tokens(self, prompt: Prompt) -> int | None:
        """Return how many tokens of a prompt, from its begin on, the engine has, or None if the
        prompt's tokens, or the engine's blocks, are not known.
        """
        most = None
        for size in self.sizes:
            keys = prompt.blocks(size)
            if keys is not None:
                most = max(most or 0, size * _num_leading(keys, self._copies))
        return most

    def _store(self, source: Hashable, event: StoredBlocks) -> None:
        if event.parent_block_hash is None:
            key = None
        elif (key := self._keys.get((source, event.parent_block_hash))) is None:
            return  # what is before it is not known, so nothing could be found behind it
        size, extras = event.block_size, event.extra_keys or [None] * len(event.block_hashes)
        if size not in self.sizes and len(self.sizes) >= MAX_SIZES:
            return
        self.sizes.add(size)
        for index, (name, extra) in enumerate(zip(event.block_hashes, extras, strict=True)):
            covered = [] if extra is None else list(extra)
            if key is None:  # the first block's hash covers the salt
                salt = str(covered.pop()) if covered and isinstance(covered[-1], str) else ""
                key = chain_root(_TOKENS, "", salt)
            if covered:  # images, adapters: nothing that we look for has such a key
                key = chain_root(_TOKENS, key.hex(), repr(covered))
            [key] = extend_chain(key, event.token_ids[index * size : (index + 1) * size], size)
            if self._keys.get((source, name), key) != key:
                self._drop(source, name)
            copy = _Copy(source, name, event.medium, event.group_idx)
            copies = self._copies.get(key, set())
            if copy in copies or len(copies) >= MAX_COPIES:
                continue
            self._keys[source, name] = key
            self._copies[key] = copies
            copies.add(copy)
            self._num_copies += 1

    def _remove(self, source: Hashable, event: RemovedBlocks) -> None:
        for name in event.block_hashes:
            if (key := self._keys.get((source, name))) is None:
                continue
            copies = self._copies[key]
            num_before = len(copies)
            copies.discard(_Copy(source, name, event.medium, event.group_idx))
            self._num_copies -= num_before - len(copies)
            if not any(each.source == source and each.name == name for each in copies):
                self._drop(source, name)

    def _drop(self, source: Hashable, name: BlockName) -> None:
        """Forget all copies that a process calls so."""
        key = self._keys.pop((source, name))
        left = {each for each in self._copies[key] if (each.source, each.name) != (source, name)}
        self._num_copies -= len(self._copies[key]) - len(left)
        if left:
            self._copies[key] = left
        else:
            del self._copies[key]

    def check_integrity(self) -> None:
        """Raise AssertionError unless each name has a copy, and each copy a name."""
        named = {(each.source, each.name) for copies in self._copies.values() for each in copies}
        assert named == set(self._keys)
        assert set(self._keys.values()) == set(self._copies)
        assert len(self._keys) <= self._max_blocks
        assert self._num_copies == sum(map(len, self._copies.values()))
        assert self._num_copies <= COPIES * self._max_blocks


def _num_leading(keys: Sequence[BlockKey], known: Container[BlockKey]) -> int:
    """Return how many of the keys, from the first on, are known."""
    for index, key in enumerate(keys):
        if key not in known:
            return index
    return len(keys)
