"""Looks after workers of this machine in threads of this process, and shares its GPUs out among
them.

Owns what is free of the GPUs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from mooncake.base import MooncakeError, Role
from mooncake.launch.cluster.facts import without_secret
from mooncake.launch.cluster.supervision.attendant import Attendant, State, WorkerEnded
from mooncake.launch.cluster.supervision.supervisor import End, How, Keeper
from mooncake.launch.cluster.supervision.worker_handle import Begin, fingerprint, place_of, start_at
from mooncake.launch.cluster.workers import GPU_SHARES
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.processes.fork_server import ForkServer
from mooncake.launch.host.secrets.credentials import read_secret
from mooncake.launch.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)


class FreeGpus:
    """What is free of the GPUs that this process sees."""

    def __init__(self) -> None:
        self._free = dict.fromkeys(machine_facts.seen_gpus(), GPU_SHARES)

    def take(self, worker_id: str, number: float) -> dict[str, int]:
        """Return the shares that a worker gets, by the name of the GPU: whole GPUs, or a share of
        one.

        Raises:
            MooncakeError: not as much is free.
        """
        wanted, each = max(1, round(number)), min(GPU_SHARES, round(number * GPU_SHARES))
        # A share goes where others are already, so that whole GPUs stay whole.
        room = [name for name, free in self._free.items() if free >= each]
        chosen = sorted(room, key=lambda name: self._free[name])[:wanted]
        if len(chosen) < wanted:
            free = sum(self._free.values()) / GPU_SHARES
            raise MooncakeError(
                f"{worker_id}: its ranks need {number:g} free GPUs; this machine has "
                f"{len(self._free)}, and {free:g} are free in all"
            )
        for name in chosen:
            self._free[name] -= each
        return dict.fromkeys(chosen, each)

    def give_back(self, shares: Mapping[str, int]) -> None:
        for name, share in shares.items():
            self._free[name] += share


class LocalKeepers:
    """Makes the keepers of one run of `mooncake serve`."""

    def __init__(
        self, run: str, secret_file: Path | None, orphan_s: float, forks: ForkServer | None
    ) -> None:
        """`run`: the name under which a later start finds the workers. `secret_file`: where they
        read the cluster secret; None: their settings have it. `orphan_s`: see `Begin`. `forks`
        starts their processes.
        """
        self._run_name = run
        self._secret_file = secret_file
        self._orphan_s = orphan_s
        self._forks = forks
        self._gpus = FreeGpus()

    def __call__(self, settings: WorkerSettings, waits: bool) -> Keeper:
        """Return the keeper of a worker.

        Raises:
            MooncakeError: there are not enough GPUs; a caller that waits asks again.
        """
        del waits
        shares: dict[str, int] = {}
        wanted = {**environment.QUIET, **environment.ONE_THREAD}
        changes = environment.missing(wanted, environment.variables()) | environment.COMPUTE
        if settings.num_gpus:
            shares = self._gpus.take(settings.worker_id, settings.num_gpus)
            changes[environment.SEEN_GPUS] = ",".join(shares)
        start = partial(start_at, forks=self._forks, changes=changes)
        begin = partial(self._begin, settings, changes.get(environment.SEEN_GPUS))
        place = place_of(self._run_name, settings.worker_id)
        return LocalKeeper(settings, place, begin, start, partial(self._gpus.give_back, shares))

    def _begin(self, settings: WorkerSettings, gpus: str | None) -> Begin:
        file = self._secret_file
        return Begin(
            settings=without_secret(settings),
            secret=settings.cluster_secret if file is None else read_secret(file),
            secret_file=None if file is None else str(file), advertise_host=settings.bind_host,
            fingerprint=fingerprint(settings, gpus), orphan_s=self._orphan_s,
        )  # fmt: skip


class LocalKeeper:
    """Has a thread of this process look after a worker."""

    def __init__(
        self,
        settings: WorkerSettings,
        place: Path,
        begin: Callable[[], Begin],
        start: Callable[..., None],
        give_back: Callable[[], None],
    ) -> None:
        """`begin` returns what the worker is told at its start, `start` starts its process (see
        `start_at`), `give_back` is called at the end.
        """
        self._settings = settings
        self._place = place
        self._begin = begin
        self._start = start
        self._give_back = give_back
        self._attendant = Attendant(is_pool=settings.role is Role.KVSTORE)
        self._end: End | None = None

    def run(self) -> None:
        self._end = None
        name = f"keeper of {self._settings.worker_id}"
        threading.Thread(target=self._attend, name=name, daemon=True).start()

    def _attend(self) -> None:
        try:
            start = partial(self._start, wanted=self._attendant.is_wanted)
            refusal = self._attendant.run(self._place, self._begin(), start)
            self._end = End(How.STOPPED, refusal or "")
        except MooncakeError as error:
            self._end = End(How.STOPPED, error.message)
        except WorkerEnded:
            self._end = End(How.DIED, "its process has ended")
        except Exception as error:  # else nobody would know that this thread has ended
            _log.exception("%s is started again: its keeper failed", self._settings.worker_id)
            self._end = End(How.DIED, repr(error))

    def end(self) -> End | None:
        return self._end

    def state(self) -> State | None:
        return self._attendant.state()

    def stop(self, drain_s: float, waits: bool) -> None:
        self._attendant.stop(drain_s, waits)

    def close(self) -> None:
        self._attendant.let_go()
        self._give_back()
