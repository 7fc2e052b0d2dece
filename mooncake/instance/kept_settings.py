"""Keeps the large sampling settings that this worker was sent. Sequences that name them share one
object.

Owned by the instance. Bounded by bytes. A setting that is dropped here stays alive in the requests
that use it.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from mooncake.base.bounded_map import SizedMap
from mooncake.base.large_settings import Setting, SettingName
from mooncake.base.messages import RequestTask

MAX_KEPT_BYTES = 64 << 20

TaskT = TypeVar("TaskT", bound=RequestTask)


class KeptSettings:
    """Settings by name, the most recently used last."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._kept: SizedMap[tuple[str, SettingName], Setting] = SizedMap(
            max_bytes, lambda key: key[1].num_bytes
        )

    @property
    def num_bytes(self) -> int:
        return self._kept.size

    def completed(self, task: TaskT) -> TaskT | None:
        """Return `task` with its named settings put back, and keep those that it carries. None = a
        named setting is not here.
        """
        if not task.named:
            return task
        found: dict[str, Setting] = {}
        for field, name in task.named.items():
            sent = None if task.settings is None else getattr(task.settings, field, None)
            value = self._use((field, name), sent)
            if value is None:
                return None
            found[field] = value
        sampling = msgspec.structs.replace(task.request.sampling, **found)
        request = msgspec.structs.replace(task.request, sampling=sampling)
        return msgspec.structs.replace(task, request=request, named={}, settings=None)

    def _use(self, key: tuple[str, SettingName], sent: Setting | None) -> Setting | None:
        value = self._kept.use(key)
        if value is None and sent is not None:
            value = self._kept[key] = sent
        return value

    def check_integrity(self) -> None:
        """Raise AssertionError when the bytes are counted wrongly, or exceed the limit."""
        assert self.num_bytes == sum(name.num_bytes for _, name in self._kept)
        assert self.num_bytes <= self._kept.bound
