"""The pages of one engine: which are held, which are reused next, and how a block is found among
them. Pages are numbers; the runner owns the bytes.

A page is *held* (one or more references), *cached* (no reference, but its content has a key) or
*free*. Each `allocate` or `hold` must be followed by one `release`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from mooncake.base.blocks import BlockKey


class BlockPool:
    """Reference-counted pages with a prefix cache. The least recently used content is evicted
    first.
    """

    def __init__(self, num_blocks: int, num_homes: int = 1, *, caches: bool = True) -> None:
        """`num_homes`: the number of ranks that each hold an equal share of the pages, in order. If
        it `caches` nothing, all pages stay private.
        """
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one page, not {num_blocks}")
        if num_blocks % num_homes:
            raise ValueError(f"{num_blocks} pages cannot be shared out among {num_homes} ranks")
        self._refs = [0] * num_blocks
        self._pages_of_home = each = num_blocks // num_homes
        # Each home has a stack, with its first page on top.
        self._free = [
            list(range(end - 1, end - 1 - each, -1)) for end in range(each, num_blocks + 1, each)
        ]
        self._cached: OrderedDict[int, None] = OrderedDict()
        """The pages that are cached and not held, the least recently released first. (The first
        entry of a plain `dict` is found by passing all that were removed before it.)
        """
        self._page_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        """The published pages, one to one with their keys."""
        # Dictionaries serve as ordered sets. A key that came and went between two reads is in
        # neither, so the order in which a reader applies the two lists does not matter.
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}
        self._caches = caches

    @property
    def num_blocks(self) -> int:
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """The number of pages without references and content."""
        return sum(map(len, self._free))

    @property
    def num_cached(self) -> int:
        """The number of pages without references whose content can still be matched."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """The number of pages that `allocate` can return now: free and cached ones."""
        return self.num_free + len(self._cached)

    @property
    def num_held(self) -> int:
        return len(self._refs) - self.num_available

    def references(self) -> dict[int, int]:
        """Return the number of references to each page that has some."""
        return {page: refs for page, refs in enumerate(self._refs) if refs}

    def ref_count(self, page: int) -> int:
        """Return the number of references to `page`."""
        return self._refs[page]

    def key_of(self, page: int) -> BlockKey | None:
        """Return the key under which `page` is published, or None."""
        return self._key_of.get(page)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Return `num_pages` pages with one reference each and undefined content, or None when
        there are not enough.

        Free pages are used first, each from the home with most of them, so that the homes share
        contexts evenly. Then the least recently released content is evicted.
        """
        if num_pages > self.num_available:
            return None
        pages: list[int] = []
        for _ in range(num_pages):
            most = max(self._free, key=len)
            if most:
                page = most.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._withdraw(page)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Add one reference to each page.

        Raises:
            ValueError: a page is free: it has no content, so it can only be allocated.
        """
        for page in pages:
            if self._refs[page] == 0 and page not in self._cached:
                raise ValueError(f"page {page} is free and cannot be held")
        for page in pages:
            if self._refs[page] == 0:
                self._cached.pop(page)
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove one reference from each page. Published content can be matched until it is
        evicted.

        The last page counts as the least recently used. So the tail of a chain is evicted before
        its head, because a head without its tail can be matched, but not the reverse.

        Raises:
            ValueError: a page is not held.
        """
        for page in reversed(pages):
            if self._refs[page] < 1:
                raise ValueError(f"page {page} is released more often than it was held")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page not in self._key_of:
                    self._add_free(page)
                else:
                    self._cached[page] = None

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the pages of the longest prefix of `keys` that is here, without adding
        references.
        """
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, key: BlockKey, page: int) -> bool:
        """Cache a held page under `key`; nothing may write to it any more.

        Returns False when another page is published under `key`, or the pool caches nothing. Then
        this page stays private.

        Raises:
            ValueError: the page is not held, or is published under another key.
        """
        if self._refs[page] < 1:
            raise ValueError(f"page {page} is not held and cannot be published")
        if not self._caches or key in self._page_of:
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

    def forget(self, key: BlockKey) -> None:
        """Remove `key` from the cache, for instance because its content proved to be wrong."""
        page = self._page_of.get(key)
        if page is None:
            return
        self._withdraw(page)
        if page in self._cached:
            del self._cached[page]
            self._add_free(page)

    def drain_events(self) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return the keys (stored, removed) since the last call, in order. Keys that were stored
        and removed since then cancel out.
        """
        stored, removed = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return stored, removed

    def inventory(self) -> list[BlockKey]:
        """Return all published keys, oldest first."""
        return list(self._page_of)

    def _withdraw(self, page: int) -> None:
        """Remove a published page from the cache."""
        key = self._key_of.pop(page)
        del self._page_of[key]
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = None

    def _add_free(self, page: int) -> None:
        self._free[page // self._pages_of_home].append(page)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each page is exactly one of free, cached and held."""
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            raise AssertionError("block pool: key -> page and page -> key do not agree")
        held = {page for page, refs in enumerate(self._refs) if refs > 0}
        free = [page for pages in self._free for page in pages]
        places = [*free, *self._cached, *sorted(held)]
        if sorted(places) != list(range(len(self._refs))):
            raise AssertionError(
                f"block pool: free {len(free)} + cached {len(self._cached)} + held "
                f"{len(held)} is not each of {len(self._refs)} pages once"
            )
        for home, pages in enumerate(self._free):
            if any(page // self._pages_of_home != home for page in pages):
                raise AssertionError(f"block pool: pages {pages} are free where they do not lie")
        published = self._key_of.keys()
        if not published.isdisjoint(free):
            raise AssertionError(f"block pool: free pages {published & set(free)} are published")
        if not self._cached.keys() <= published:
            without = self._cached.keys() - published
            raise AssertionError(f"block pool: cached pages {without} have no key")
