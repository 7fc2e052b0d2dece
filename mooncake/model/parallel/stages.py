"""One rank's place in a pipeline: its layers, what it gets from the stage before and gives to the
next stage, and how long each stage computed. The last stage logs which one is slow.

Ranks of a stage have the same activations. Each sends only its columns, to the rank of the next
stage with the same part of every layer; there they are gathered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from mooncake.base import Shape
from mooncake.base.models.parallel import stage_layers
from mooncake.model.copies import Copies, HostCopies
from mooncake.model.parallel.group import Group

SLOW_WINDOW_S = 10.0
"""After this many seconds of steps, a slow stage is looked for."""
SLOW_SHARE = 0.5
"""A stage is slow if, for more than this share of those seconds, it computed longer than any other
stage would with as many layers.
"""
SLOW = "stage_slow_s_"
"""A counter's name before the stage's number: how long others waited for it while it was slow."""
WAITED_FOR = "stage_waited_for_s_"
"""A counter's name before the stage's number: how much longer it computed than any other stage
would have with as many layers.
"""
_SLOW_TOLD_S = 60.0
"""The least time between two log lines about a slow stage."""

_log = logging.getLogger(__name__)


class Stage:
    """The stage of one rank, among all layers of a model."""

    def __init__(
        self, group: Group, shape: Shape, num_layers: int, copies: Copies | None = None
    ) -> None:
        """group: all ranks of the instance, from which those of each stage are taken. copies: to
        the device that this rank computes on; None: it is the host.
        """
        self._number = number = shape.stage_of(group.rank)
        self.layers = stage_layers(num_layers, shape.pp)[number]
        self.is_first = number == 0
        self.is_last = number == shape.pp - 1
        self.ranks = group.part(shape.tp)
        """The ranks that share these layers."""
        self._all = group
        self._copies = copies or HostCopies()
        self._began_s = 0.0
        self._waited_s = 0.0
        self._before_s: list[float] = []

    def kv_layers(self, num_layers: int) -> range:
        """Return the layers whose KV this rank's pages hold, of the `num_layers` that pages have.
        If these are more than the model's, because a layer makes drafts, the last stage has it.
        """
        return range(self.layers.start, num_layers) if self.is_last else self.layers

    def connect(self, row: torch.Tensor) -> None:
        """Connect to the stages beside this one, by passing a row of activations through all; all
        ranks call this at once. Ranks connect within a limit of time, and in their first steps they
        may wait for longer: each stage compiles kernels then.
        """
        self.begin()
        if not self.is_first:
            row = self.receive(row)
        if not self.is_last:
            self.send(row)

    def begin(self) -> None:
        """Begin a step. Times are counted from now on."""
        if not (self.is_first and self.is_last):
            self._finish()  # a device may have to wait for a stage that has not received yet
        self._began_s = time.perf_counter()
        self._waited_s = 0.0
        self._before_s = []

    @property
    def seconds(self) -> list[float]:
        """How long each stage so far has computed this step, without waiting."""
        return [*self._before_s, time.perf_counter() - self._began_s - self._waited_s]

    def go_on(self) -> None:
        """Signal that this rank has come to its next layer."""
        self._all.go_on()

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """Return the activations of the next step, [rows, hidden] as `like`, from the stage before.

        Raises:
            GroupError: another rank failed.
        """
        width = self._columns(like)
        part = like.new_empty(like.shape[0], width)
        before_s = torch.empty(self._number, dtype=torch.float64, device=like.device)
        asked_s = time.perf_counter()
        self._all.receive(part, self._all.rank + self.ranks.size)
        self._all.receive(before_s, self._all.rank + self.ranks.size)
        self._before_s = self._copies.fetch(before_s).wait().tolist()
        self._waited_s = time.perf_counter() - asked_s
        return part if width == like.shape[1] else self.ranks.gather(part)

    def send(self, x: torch.Tensor) -> None:
        """Send activations, [rows, hidden], to the next stage.

        Raises:
            GroupError: another rank failed.
        """
        self._finish()
        seconds = self._copies.send(torch.tensor(self.seconds, dtype=torch.float64))
        width = self._columns(x)
        first = 0 if width == x.shape[1] else self.ranks.rank * width
        part = x[:, first : first + width].contiguous()
        self._all.send(part, self._all.rank - self.ranks.size)
        self._all.send(seconds, self._all.rank - self.ranks.size)

    def _finish(self) -> None:
        """Return when the device has computed what it was given: the times are its own."""
        end = self._copies.mark()
        if end is not None:
            end.reached()

    def _columns(self, x: torch.Tensor) -> int:
        """Return how many columns each rank sends: all of them, when they do not divide evenly."""
        each, rest = divmod(x.shape[1], self.ranks.size)
        return x.shape[1] if rest else each


class StageTimes:
    """How long stages computed, step by step. Names the stages for which others wait. A layer
    should take equally long in all of them.
    """

    def __init__(self, num_layers: Sequence[int]) -> None:
        """`num_layers`: of each stage; there are two or more stages."""
        self.counters = {f"{WAITED_FOR}{stage}": 0.0 for stage in range(len(num_layers))}
        self._num_layers = num_layers
        self._window_s = 0.0
        self._late_s = [0.0] * len(num_layers)
        self._told_s: dict[int, float] = {}

    def add(self, seconds: Sequence[float], now: float) -> None:
        """Count a step in which the stages computed for these `seconds`, and log a slow one. `now`:
        monotonic seconds.
        """
        of_layer_s = [s / num for s, num in zip(seconds, self._num_layers, strict=True)]
        *_, second_s, most_s = sorted(of_layer_s)
        slowest = of_layer_s.index(most_s)
        late_s = (most_s - second_s) * self._num_layers[slowest]
        self._late_s[slowest] += late_s
        self.counters[f"{WAITED_FOR}{slowest}"] += late_s
        self._window_s += seconds[slowest]
        if self._window_s < SLOW_WINDOW_S:
            return
        for stage, late_s in enumerate(self._late_s):
            if late_s > SLOW_SHARE * self._window_s:
                self._name(stage, late_s, now)
        self._window_s, self._late_s = 0.0, [0.0] * len(self._late_s)

    def _name(self, stage: int, late_s: float, now: float) -> None:
        counter = f"{SLOW}{stage}"
        self.counters[counter] = self.counters.get(counter, 0.0) + late_s
        if now - self._told_s.get(stage, -_SLOW_TOLD_S) < _SLOW_TOLD_S:
            return
        self._told_s[stage] = now
        _log.warning(
            "stage %d of %d of this worker is slow: others waited %.1f s for it; look for other "
            "load on the cores and memory of its machine",
            stage, len(self._late_s), late_s,
        )  # fmt: skip
