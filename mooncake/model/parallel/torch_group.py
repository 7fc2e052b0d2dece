"""A group over torch's process groups: gloo for tensors on the host, NCCL for tensors on GPUs.

It makes no default group. Ranks of one machine find each other through a file that the lead makes
and its followers inherit. So nobody else can join, and gloo's own connections go over loopback.
Ranks of several machines find each other through a store that the lead serves, and each listens at
its host.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from mooncake.base.threads import VitalThread
from mooncake.model.parallel.group import Group, GroupError, Solo, Traffic, ordered_sum

GLOO, NCCL = "gloo", "nccl"
LOOPBACK = "127.0.0.1"
_ON_THEIR_WAY = 4
"""How many tensors may be sent to the next stage before it receives them."""
_ABORT_S = 10.0
"""How long NCCL may take to end exchanges whose ranks are gone; usually it takes milliseconds."""
_NO_LIMIT = timedelta(days=1)
ONE_SHOT_BYTES = 1 << 16
"""Smaller parts are sent whole to every rank. Larger ones are summed in slices, one for
each rank.
"""


class TorchGroup:
    """One rank of a group of processes. They connect at the first exchange.

    torch's own sums add in an order that depends on sizes and ranks. So parts are sent unchanged
    and added here.
    """

    def __init__(
        self,
        kind: str,
        rank: int,
        size: int,
        meeting: int | Store,
        timeout_s: float,
        name: str = "all",
        host: str = LOOPBACK,
        limit: timedelta | None = None,
    ) -> None:
        """kind: "gloo" or "nccl". meeting: where the ranks find each other: the descriptor of one
        file, empty at first, which stays open until this group has been used; or a store that all
        ranks reach.
        timeout_s: how long the others may take to come to an exchange. name: tells groups apart
        that meet there. host: where gloo listens. limit: how long an exchange may take once ranks
        have connected; None: as long as they may take for that.
        """
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self._kind = kind
        self._timeout_s = timeout_s
        self._name = name
        self._meeting = meeting
        self._host = host
        self._limit = limit or timedelta(seconds=timeout_s)
        self._pairs: TorchGroup | None = None
        self._own_file: int | None = None
        self._ranks: Any = None
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._parts: list[TorchGroup] = []
        self._failed = False

    def __del__(self) -> None:
        # torch's store opens its file once more when it ends: by a number that by then was another
        # file's, it would end the process or write there.
        self._sent.clear()
        self._ranks = None
        if self._own_file is not None:
            os.close(self._own_file)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `x`. Raises GroupError when another rank failed, or did not
        come.
        """
        self.traffic.count(x)
        if x.numel() * x.element_size() <= ONE_SHOT_BYTES:
            return ordered_sum(self._gathered(x))
        flat = x.reshape(-1)
        left_out = -flat.numel() % self.size
        if left_out:
            flat = torch.cat((flat, flat.new_zeros(left_out)))
        slices = self._exchanged(flat.view(self.size, -1))
        total = self._gathered(ordered_sum(slices)).view(-1)
        return total[: x.numel()].view(x.shape)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' `x` side by side. Raises GroupError when another rank failed, or did
        not come.
        """
        self.traffic.count(x)
        return torch.cat(self._gathered(x).unbind(0), dim=-1)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' parts for this one. Raises GroupError when another rank failed, or did
        not come.
        """
        self.traffic.count(x)
        return self._exchanged(x)

    def send(self, x: torch.Tensor, to: int) -> None:
        """Begin to send a copy of `x` to rank `to`. Raises GroupError when that rank failed."""
        self.traffic.count(x)
        kept = x.contiguous().clone()
        with _as_group_error():
            while len(self._sent) >= _ON_THEIR_WAY:
                self._wait(self._sent.popleft()[0])
            self._sent.append((self._of_pairs().send([_bytes_of(kept)], to, 0), kept))

    def receive(self, out: torch.Tensor, source: int) -> None:
        """Write the next tensor from rank `source` into `out`. Raises GroupError when that rank
        failed.
        """
        with _as_group_error():
            self._wait(self._of_pairs().recv([_bytes_of(out)], source, 0))

    def go_on(self) -> None:
        """Do nothing, because receivers wait here without a limit. Whoever watches the steps ends
        them.
        """

    def meet(self) -> None:
        """Wait for all ranks. Raises GroupError when another rank failed, or did not come."""
        here = self._gathered(torch.zeros(1, device="cuda" if self._kind == NCCL else "cpu"))
        with _as_group_error():
            here.tolist()  # a GPU's exchange has only been begun: the host waits for its end

    def part(self, size: int) -> Group:
        """Return this rank's group of `size` ranks, which connect to each other."""
        if size == self.size:
            return self
        if size == 1:
            return Solo()
        name = f"{self._name}-{size}-{self.rank // size}"
        part = TorchGroup(
            self._kind, self.rank % size, size, self._meeting, self._timeout_s, name, self._host
        )
        self._parts.append(part)
        return part

    def fail(self) -> None:
        """Begin to end all exchanges of this rank on its GPU, in all groups cut from this one. A
        GPU waits for a rank that has ended as for one that is late, and torch's watchdog does not
        know replayed work. If a GPU does not give up, this process ends.

        Over gloo this does nothing: a rank that waits hears of the end when the other rank's
        process, and so its connection, ends.
        """
        if self._kind == NCCL and not self._failed:
            self._failed = True
            VitalThread(self._abort, "group-abort").start()

    def _abort(self) -> None:
        aborting = threading.Thread(target=self._abort_all, name="nccl-abort", daemon=True)
        aborting.start()
        aborting.join(_ABORT_S)
        if aborting.is_alive():
            raise GroupError(f"NCCL did not end its exchanges within {_ABORT_S:g} s")

    def _abort_all(self) -> None:
        self._failed = True
        for part in self._parts:
            part._abort_all()  # noqa: SLF001
        if self._ranks is not None:
            self._ranks.abort()

    def _of_pairs(self) -> Any:
        """Return that by which one rank sends to another. A receiver waits without a limit. NCCL
        has one limit for all exchanges of a group, so pairs are a group of their own.
        """
        if self._kind == GLOO:
            return self._connected()
        if self._pairs is None:
            self._pairs = TorchGroup(
                self._kind, self.rank, self.size, self._meeting, self._timeout_s,
                f"{self._name}-pairs", self._host, _NO_LIMIT,
            )  # fmt: skip
            self._parts.append(self._pairs)
            self._pairs._failed = self._failed  # noqa: SLF001
        return self._pairs._connected()  # noqa: SLF001

    def _wait(self, work: dist.Work) -> None:
        """Have all that comes next wait for what a pair exchanges: on a GPU the device's work, on
        the CPU this thread.
        """
        if self._kind == NCCL:
            work.wait()
        else:
            work.wait(_NO_LIMIT)

    def _connected(self) -> Any:
        """Connect to the other ranks unless this is done. They connect too."""
        if self._ranks is not None:
            return self._ranks
        if self._failed:
            raise GroupError("this rank's exchanges have been ended: another rank failed")
        if isinstance(self._meeting, int):
            self._own_file = os.dup(self._meeting)
            store: Store = FileStore(f"/proc/self/fd/{self._own_file}", self.size)
        else:
            store = self._meeting
        store.set_timeout(timedelta(seconds=self._timeout_s))
        make = {GLOO: _gloo, NCCL: _nccl}[self._kind]
        with _as_group_error():
            prefixed = PrefixStore(self._name, store)
            self._ranks = make(prefixed, self.rank, self.size, self._limit, self._host)
        return self._ranks

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' `x`, [ranks, *x.shape]."""
        made = x.new_empty(self.size, *x.shape)
        self._run(self._connected()._allgather_base, made, x)  # noqa: SLF001 - copies nothing after
        return made

    def _exchanged(self, x: torch.Tensor) -> torch.Tensor:
        """Return [ranks, ...]: from each rank's `x` the part at this rank's place."""
        made = torch.empty_like(x)
        swap = self._connected().alltoall_base
        self._run(lambda to, whence: swap(to, whence, [], []), made, x)
        return made

    def _run(
        self,
        exchange: Callable[[torch.Tensor, torch.Tensor], dist.Work],
        made: torch.Tensor,
        x: torch.Tensor,
    ) -> None:
        """Exchange bytes, whatever dtype `x` has."""
        if not x.numel():
            return
        with _as_group_error():
            exchange(_bytes_of(made), _bytes_of(x.contiguous())).wait()


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _gloo(store: Store, rank: int, size: int, limit: timedelta, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    # Without a device of its own, gloo would listen on whatever this host's name stands for.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
    options._timeout = limit  # noqa: SLF001
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, limit: timedelta, _host: str) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit  # noqa: SLF001
    return dist.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _as_group_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        raise GroupError(f"another rank of this model failed or did not answer: {text}") from error
