"""The messages of shared memory over a Unix socket, and the pages that an owner hands out.

After the handshake a client asks for regions by id and gets their memory as a descriptor. The state
page has one word for each region, which shows clients that it is still registered. Another page
shows which grants were revoked. Only the owner writes these two. The third page belongs to the
client: each of its hands shows there the grant by which it copies, so that the owner knows what may
still land. The client holds a pipe for as long as it may copy; the kernel closes it when the client
dies.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence

import msgspec

from mooncake.transfer.grants import NUM_SLOTS
from mooncake.transfer.local import MAX_HANDS
from mooncake.transfer.memory import SharedWords, map_words
from mooncake.transfer.net.codec import Codec

STATE_SLOTS = 8192
NUM_PAGES = 4
"""Descriptors that come with the end of a handshake: state, grants, hands, pipe."""


class OpenRegion(msgspec.Struct, frozen=True, tag="open"):
    """The client asks for a region."""

    region_id: int


class RegionOpened(msgspec.Struct, frozen=True, tag="opened"):
    """The owner hands out the region, whose descriptor comes with this message."""

    region_id: int
    num_bytes: int
    slot: int
    """Word of the state page that holds `region_id` while it is registered."""
    guarded: bool = False
    """True if it is written to by grants only."""


class RegionRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The owner refuses. `unshared`: the region exists, but only other protocols reach it."""

    region_id: int
    reason: str
    unshared: bool


Answer = RegionOpened | RegionRefused
CODEC: Codec[OpenRegion, Answer] = Codec(OpenRegion, Answer, "shared memory")


class StatePage:
    """The owner's page. Slots are reused, but never for the same region id."""

    def __init__(self) -> None:
        self._shared = SharedWords(STATE_SLOTS)
        self.fd = self._shared.fd
        """The descriptor for clients, who cannot write through it."""
        self._words = self._shared.words
        self._slots: dict[int, int] = {}
        self._free = list(range(STATE_SLOTS - 1, -1, -1))

    def slot_of(self, region_id: int) -> int | None:
        """Return the slot of a region, marking it registered; None when all are taken."""
        slot = self._slots.get(region_id)
        if slot is None and self._free:
            slot = self._slots[region_id] = self._free.pop()
            self._words[slot] = region_id
        return slot

    def withdraw(self, region_id: int) -> None:
        """Mark a region as gone."""
        slot = self._slots.pop(region_id, None)
        if slot is not None:
            self._words[slot] = 0
            self._free.append(slot)

    def close(self) -> None:
        """Mark all regions as gone."""
        for region_id in list(self._slots):
            self.withdraw(region_id)
        self._shared.close()


class OwnerPages:
    """The pages that an owner has handed out at the handshake, on the client's side.

    Everything that may still copy refers to this object. When nothing does, the pipe tells the
    owner.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        """Map the pages of the descriptors, which the caller closes. Raises TransferError."""
        state, grants, hands, pipe = fds
        self.state = map_words(state, STATE_SLOTS)
        self.grants = map_words(grants, NUM_SLOTS)
        self.hands = map_words(hands, MAX_HANDS, writable=True)
        self._pipe = os.dup(pipe)

    def owner_lives(self) -> bool:
        """Ask the kernel whether the owner still holds its end of the pipe. Any thread may call
        this.
        """
        poll = select.poll()
        poll.register(self._pipe, 0)
        return not poll.poll(0)

    def __del__(self) -> None:
        pipe = getattr(self, "_pipe", None)
        if pipe is not None:
            os.close(pipe)


class Hands:
    """The owner's view of one client's hands."""

    def __init__(self) -> None:
        self._words = SharedWords(MAX_HANDS, theirs=True)
        self.fd = self._words.fd
        self.heard, self.pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """The two ends of a pipe: ours, which hangs up when the client can no longer copy, and the
        client's.
        """

    def given(self) -> None:
        """Close the descriptors that were sent to the client."""
        self._words.given()
        os.close(self.pipe)

    def hold(self, grant: int) -> bool:
        """Return whether the client copies by a grant."""
        return grant in self._words.words.tolist()

    def close(self) -> None:
        """Release the client's words and our end of the pipe. Call it after `given`."""
        self._words.close()
        os.close(self.heard)
