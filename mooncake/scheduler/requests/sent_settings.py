"""Remembers the large sampling settings that each worker has been sent, so that a task only names
them.

Owned by the attempt tracker. It may be wrong: a message was lost, or the worker does not keep a
setting any more. Then the worker refuses the task, and the next task carries the setting.
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
"""Bytes of the settings that one worker is assumed to keep. Workers keep more, for several
gateways. One request has `MAX_SETTINGS_BYTES` at most.
"""
MAX_NAMES = 32
"""Settings whose names are remembered. The sequences of a call come one after another, with the
same objects as settings, so each is hashed once for a call.
"""

TaskT = TypeVar("TaskT", bound=RequestTask)

_DEFAULTS = SamplingParams()
_Names = SizedMap[SettingName, bool]
"""Names of the settings that one worker was sent."""


class SentSettings:
    """What each worker was sent, the most recently used settings last; one epoch for each
    worker.
    """

    def __init__(self) -> None:
        self._sent: dict[str, tuple[WorkerRef, _Names]] = {}
        self._names: BoundedMap[int, tuple[Setting, SettingName]] = BoundedMap(MAX_NAMES)

    def shortened(self, task: TaskT, worker: WorkerRef) -> TaskT:
        """Return `task` for `worker`: its large settings are named, and included if they are new
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
        """Assume no longer that a worker has what it was sent."""
        self._sent.pop(worker_id, None)

    def _kept(self, worker: WorkerRef) -> _Names:
        known, kept = self._sent.get(worker.worker_id, (None, None))
        if kept is None or known != worker:  # another epoch of the worker has nothing
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
