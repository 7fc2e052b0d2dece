"""The large sampling settings that each worker has been sent: a task names them instead.

Owned by the attempt tracker. What it believes may be wrong: a message was lost, or the worker keeps
a setting no longer. Then the worker turns the task away, and the next one carries the setting.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from mooncake.base.bounded_map import BoundedMap, SizedMap
from mooncake.base.large_settings import (
    LargeSettings,
    Setting,
    SettingName,
    large_settings,
    name_setting,
)
from mooncake.base.messages import RequestTask, WorkerRef
from mooncake.base.sampling import SamplingParams

MAX_SENT_BYTES = 16 << 20
"""Of the settings that one worker is believed to keep; workers keep more, for several gateways. One
request has `MAX_SETTINGS_BYTES` at most."""
MAX_NAMES = 32
"""Settings whose names are remembered. The sequences of a call come one after another, with the
same objects as settings, so each is hashed once a call."""

TaskT = TypeVar("TaskT", bound=RequestTask)

_DEFAULTS = SamplingParams()
_Names = SizedMap[SettingName, bool]
"""Of the settings that one worker was sent."""


class SentSettings:
    """What each worker was sent, the settings used last; one epoch a worker."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[WorkerRef, _Names]] = {}
        self._names: BoundedMap[int, tuple[Setting, SettingName]] = BoundedMap(MAX_NAMES)

    def shortened(self, task: TaskT, worker: WorkerRef) -> TaskT:
        """Return `task` for `worker`: its large settings are named, and carried if they are new
        there. The settings count as sent from now on.
        """
        sampling = task.request.sampling
        large = large_settings(sampling)
        names = {field: self._name(field, value) for field, value in large.items()}
        if not names:
            return task
        kept = self._kept(worker)
        new: dict[str, Any] = {}
        for field, name in names.items():
            if not kept.use(name):
                kept[name] = True
                new[field] = large[field]
        defaults = {field: getattr(_DEFAULTS, field) for field in names}
        bare = msgspec.structs.replace(sampling, **defaults)
        return msgspec.structs.replace(
            task,
            request=msgspec.structs.replace(task.request, sampling=bare),
            named=names,
            settings=LargeSettings(**new) if new else None,
        )

    def forget(self, worker_id: str) -> None:
        """Believe no longer that a worker has what it was sent."""
        self._sent.pop(worker_id, None)

    def _kept(self, worker: WorkerRef) -> _Names:
        known, kept = self._sent.get(worker.worker_id, (None, None))
        if kept is None or known != worker:  # another epoch has nothing
            kept = SizedMap(MAX_SENT_BYTES, lambda name: name.num_bytes)
            self._sent[worker.worker_id] = worker, kept
        return kept

    def _name(self, field: str, value: Setting) -> SettingName:
        """Return the name of a setting. It is kept with the object, so that no other object can
        have its identity.
        """
        known = self._names.use(id(value))
        if known is None:
            known = self._names[id(value)] = value, name_setting(field, value)
        return known[1]
