"""The port to a NIC: registered memory, reliable connections, completions.

`rdma/verbs.py` is the real one; tests of the backend's rules use another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from mooncake.transfer.rdma.wire import NicAddress, PairAddress


class Outcome(Enum):
    """The result of a work request."""

    ARRIVED = "arrived"
    REFUSED = "the peer's NIC refused the address or the key"
    LOCAL_MEMORY = "our NIC refused our own memory"
    FLUSHED = "given up, because an earlier one failed"
    LINK = "the path broke"


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a work request, and of all earlier ones of the same queue pair."""

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
    """True if the CPU may read our bytes too while `post` is called; short ones travel with the
    request. It is False for a GPU's memory, whose address means nothing to the CPU.
    """


class Registration(Protocol):
    """Memory that one NIC may touch."""

    @property
    def local_key(self) -> int: ...

    @property
    def remote_key(self) -> int: ...

    def close(self) -> None:
        """Withdraw the memory. On return the NIC does not touch it any more and refuses peers."""


class QueuePair(Protocol):
    """One end of a reliable connection. Methods raise TransferError when the NIC refuses."""

    @property
    def address(self) -> PairAddress: ...

    def serve(self, peer: PairAddress) -> None:
        """Connect as the end whose memory is read and written."""

    def connect(self, peer: PairAddress) -> None:
        """Connect as the end that sends requests."""

    def post(self, requests: Sequence[WorkRequest]) -> None:
        """Give requests to the NIC, in order. The caller makes sure that there is room for them."""

    def close(self) -> None:
        """Destroy the pair. On return none of its transfers, in or out, touches memory."""


class Nic(Protocol):
    """One port of an RDMA device."""

    @property
    def address(self) -> NicAddress: ...

    @property
    def depth(self) -> int:
        """Number of work requests that a queue pair holds."""

    @property
    def max_pairs(self) -> int:
        """Number of queue pairs that may be posted to at a time: all their requests may fail at
        once, and the completion queue must hold the results.
        """

    def fileno(self) -> int:
        """A descriptor that becomes readable when requests ended (after `arm`)."""

    def events_fileno(self) -> int:
        """A descriptor that becomes readable when the port changed."""

    def take_events(self) -> None:
        """Read the changes reported so far. The address may differ afterwards.

        Raises TransferError when the device has failed.
        """

    def is_active(self) -> bool:
        """Return whether the port's link is up now."""

    def register(self, address: int, num_bytes: int) -> Registration:
        """Let the NIC touch memory of this process, or of a device whose driver helps it. Raises
        TransferError.
        """

    def register_dmabuf(self, fd: int, offset: int, num_bytes: int) -> Registration:
        """Let the NIC touch a device's memory, which begins at `offset` in the buffer of `fd`. The
        NIC addresses the memory by this offset too. Raises TransferError.
        """

    def new_pair(self) -> QueuePair:
        """Return an unconnected queue pair. Raises TransferError."""

    def take_completions(self) -> list[Completion]:
        """Return what ended, without waiting. Raises TransferError when the device has failed."""

    def arm(self) -> None:
        """Have the descriptor signal the next completion. Take completions once more after this
        call.

        Raises TransferError when the device has failed.
        """

    def reopen(self) -> None:
        """Open the device again after a failure. Descriptors change; pairs and registrations are
        gone. Raises TransferError when that fails; it may then be called again.
        """

    def close(self) -> None:
        """Release the device. The caller has closed its pairs and registrations."""
