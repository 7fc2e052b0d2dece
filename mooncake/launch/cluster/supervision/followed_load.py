"""Which workers `mooncake serve --autoscale` starts and ends, by the advice of its gateway.

Values in, values out: the supervisor starts and ends them, and `scheduler.scaling` decides how many
there should be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.scheduler.scaling.config import ROLES
from mooncake.scheduler.scaling.policy import RoleAdvice


class Changes(NamedTuple):
    """What a supervisor is to do."""

    start: list[WorkerSettings]
    leave: list[str]
    """Workers that are to end once others do their work."""


def first_workers(
    config: ServeConfig, settings: Sequence[WorkerSettings], runs: Callable[[str], bool]
) -> list[WorkerSettings]:
    """Return the workers with which a cluster starts, of all that there may be: as many prefill and
    decode workers as `--prefill` and `--decode` say, inside the bounds, and those that an earlier
    start has left behind (`runs`).
    """
    if not config.follows_load:
        return list(settings)
    left = {role: config.first_engines(role) for role in ROLES}
    first = []
    for each in settings:
        role = each.role
        if role not in left or left[role] > 0 or runs(each.worker_id):
            first.append(each)
            left[role] = left.get(role, 0) - 1
    return first


class LoadFollower:
    """Says which workers are to start and to leave."""

    def __init__(
        self,
        settings: Sequence[WorkerSettings],
        advice: Callable[[], Sequence[RoleAdvice]],
        drain_s: float,
    ) -> None:
        """`settings`: of all workers that there may be; of each role those with the lowest numbers
        start first. `advice` returns the newest advice. `drain_s`: how long a worker that leaves
        may finish its requests.
        """
        self.drain_s = drain_s
        self._settings = {
            role: {each.worker_id: each for each in settings if each.role is role} for role in ROLES
        }
        self._advice = advice

    def changes(self, held: Mapping[str, bool], leaving: Collection[str]) -> Changes:
        """Return what is to change. `held`: the workers that serve or start, the oldest first, and
        whether each is ready. `leaving`: those that were told to leave and have not ended.

        Workers that joined from elsewhere count too. Nobody leaves by advice that does not know of
        a worker that is ready: it was made before that worker joined.
        """
        changes = Changes([], [])
        for each in self._advice():
            own = self._settings[each.role]
            mine = [name for name in held if name in own]
            wanted = max(0, each.wanted - each.now + len(each.counted & own.keys()))
            free = [own[name] for name in own if name not in held and name not in leaving]
            changes.start.extend(free[: max(0, wanted - len(mine))])
            if all(name in each.counted for name in mine if held[name]):
                last = sorted(mine, key=lambda name: not held[name])  # who is not ready goes first
                changes.leave.extend(last[::-1][: max(0, len(mine) - wanted)])
        return changes
