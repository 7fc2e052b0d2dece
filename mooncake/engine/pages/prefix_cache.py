"""The prefix cache: block key -> page and back, and the changes since they were last reported.

Owned by `BlockPool`; it does not know which pages are held or reused next.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.base.blocks import BlockKey


class PrefixCache:
    """A one-to-one map between block keys and pages, with a net log of changes."""

    def __init__(self) -> None:
        self._page_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        # Dictionaries serve as ordered sets. A key that came and went between two reads is in
        # neither, so the order in which a reader applies the two lists does not matter.
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the pages of the longest cached prefix of `keys`."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def key_of(self, page: int) -> BlockKey | None:
        """Return the key published for `page`."""
        return self._key_of.get(page)

    def publish(self, key: BlockKey, page: int) -> bool:
        """Cache `page` under `key`. Returns False when `key` has a page already, which stays.

        Raises:
            ValueError: the page is published under another key.
        """
        if key in self._page_of:
            return False
        if page in self._key_of:
            raise ValueError(f"page {page} is published under another key")
        self._page_of[key] = page
        self._key_of[page] = key
        if key in self._removed:
            del self._removed[key]
        else:
            self._stored[key] = None
        return True

    def forget_page(self, page: int) -> None:
        """Remove `page` from the cache if it is there."""
        key = self._key_of.pop(page, None)
        if key is None:
            return
        del self._page_of[key]
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = None

    def page_of(self, key: BlockKey) -> int | None:
        """Return the page published under `key`."""
        return self._page_of.get(key)

    def drain_events(self) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return the keys (stored, removed) since the last call, in order. Keys that were stored
        and removed since then cancel out.
        """
        stored, removed = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return stored, removed

    def inventory(self) -> list[BlockKey]:
        """Return all keys, oldest publication first."""
        return list(self._page_of)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the two maps are inverse to each other."""
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            raise AssertionError("prefix cache: key -> page and page -> key do not agree")
