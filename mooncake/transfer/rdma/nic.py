"""The port to a NIC: registered memory, reliable connections, completions.

`rdma/verbs.py` is the real one; tests of the backend's rules have another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from mooncake.transfer.rdma.wire import NicAddress, PairAddress


class Outcome(Enum):
    """How a work request ended."""

    ARRIVED = "arrived"
    REFUSED = "the peer's NIC refused the address or the key"
    LOCAL_MEMORY = "our NIC refused our own memory"
    FLUSHED = "given up, because an earlier one failed"
    LINK = "the path broke"


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a work request, and of all before it of the same queue pair."""

    work_id: int
    outcome: Outcome
    detail: str


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """One one-sided copy."""

    work_id: int
    is_write: bool
    local_address: int
    local_key: int
    remote_address: int
    remote_key: int
    num_bytes: int
    signalled: bool
    """True if its success is reported (a failure always is)."""
    in_host: bool = False
    """True if the CPU may read our bytes too, while `post` is called: short ones go with the
    request. Of a GPU's memory it may not, and the address means nothing to it.
    """


class Registration(Protocol):
    """Memory one NIC may touch."""

    @property
    def local_key(self) -> int: ...

    @property
    def remote_key(self) -> int: ...

    def close(self) -> None:
        """Withdraw it; on return the NIC touches it no more and refuses peers."""


class QueuePair(Protocol):
    """One end of a reliable connection. Methods raise TransferError when the NIC refuses."""

    @property
    def address(self) -> PairAddress: ...

    def serve(self, peer: PairAddress) -> None:
        """Connect as the end that is read from and written to."""

    def connect(self, peer: PairAddress) -> None:
        """Connect as the end that sends requests."""

    def post(self, requests: Sequence[WorkRequest]) -> None:
        """Hand requests to the NIC, in order; there must be room for them."""

    def close(self) -> None:
        """Destroy it; on return nothing that came or goes by it touches memory."""


class Nic(Protocol):
    """One port of an RDMA device."""

    @property
    def address(self) -> NicAddress: ...

    @property
    def depth(self) -> int:
        """Work requests that a queue pair holds."""

    @property
    def max_pairs(self) -> int:
        """Queue pairs that may be posted to at a time: all their requests may fail at once, and the
        completion queue must hold that.
        """

    def fileno(self) -> int:
        """A descriptor that becomes readable when requests ended (after `arm`)."""

    def events_fileno(self) -> int:
        """A descriptor that becomes readable when the port changed."""

    def take_events(self) -> None:
        """Read the changes reported so far, after which the address may be another.

        Raises TransferError when the device has failed.
        """

    def is_active(self) -> bool:
        """Return whether the port's link is up now."""

    def register(self, address: int, num_bytes: int) -> Registration:
        """Let the NIC touch memory of this process, or of a device whose driver helps it. Raises
        TransferError.
        """

    def register_dmabuf(self, fd: int, offset: int, num_bytes: int) -> Registration:
        """Let the NIC touch a device's memory, which begins at `offset` in what `fd` stands for,
        and for the NIC at this number too. Raises TransferError.
        """

    def new_pair(self) -> QueuePair:
        """Return an unconnected queue pair. Raises TransferError."""

    def take_completions(self) -> list[Completion]:
        """Return what ended, without waiting. Raises TransferError when the device has failed."""

    def arm(self) -> None:
        """Have the descriptor signal the next completion; take completions once more after that.

        Raises TransferError when the device has failed.
        """

    def reopen(self) -> None:
        """Open the device again after a failure, with other descriptors; pairs and registrations
        are gone. Raises TransferError when that fails, and may be called again then.
        """

    def close(self) -> None:
        """Give the device back; pairs and registrations were closed before."""
