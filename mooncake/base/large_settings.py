"""Sampling settings that may be large: a grammar, lists of tokens, a bias for many tokens.

The sequences of one call share them, and often the calls of one client do. So each setting has a
name made from its content, and travels to each worker once (`messages.RequestTask`). The gateway
remembers what it sent (`SentSettings`), and the worker what it got (`KeptSettings`).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake.base.bounded_map import BoundedMap, SizedMap
from mooncake.base.request import Grammar, SamplingParams

if TYPE_CHECKING:  # a task carries large settings, so its module imports this one
    from mooncake.base.messages import RequestTask, WorkerRef

MIN_NAMED_BYTES = 4096
"""A smaller setting travels with each request, because a name would save little."""

MAX_SETTINGS_BYTES = 4 << 20
"""The bound on the large settings of one request, by `settings_bytes`. The API server refuses a
request with more, so that gateways and workers have room for the settings of several clients.
"""

MAX_SENT_BYTES = 16 << 20
"""Bytes of the settings that one worker is assumed to keep. Workers keep more, for several
gateways. One request has `MAX_SETTINGS_BYTES` at most.
"""
MAX_KEPT_BYTES = 64 << 20
"""Bytes of the settings that a worker keeps."""
MAX_NAMES = 32
"""Settings whose names are remembered. The sequences of a call come one after another, with the
same objects as settings, so each is hashed once for a call.
"""

Setting = Grammar | dict[int, float] | list[int] | frozenset[int] | list[list[int]]


class SettingName(msgspec.Struct, frozen=True, array_like=True):
    """A setting by its content."""

    digest: bytes
    num_bytes: int
    """About how much memory the setting takes."""


class LargeSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The large fields of `SamplingParams`. None: the field is not among those sent."""

    grammar: Grammar | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop_token_ids: frozenset[int] | None = None
    bad_words: list[list[int]] | None = None


LARGE_SETTINGS = LargeSettings.__struct_fields__

_DEFAULTS = SamplingParams()
_ENCODER = msgspec.msgpack.Encoder()
_CHAR_BYTES, _INT_BYTES, _ENTRY_BYTES, _LIST_BYTES = 4, 40, 160, 64
"""How many bytes a character, an int in a list, an int with its float in a dictionary, and an empty
list take at most. They must not be too small, because bounds on memory are computed from them.
"""


def setting_bytes(sampling: SamplingParams) -> dict[str, int]:
    """Return about how much memory each setting that may be large takes, by field."""
    values = {name: getattr(sampling, name) for name in LARGE_SETTINGS}
    return {name: _num_bytes(value) for name, value in values.items() if value is not None}


def large_settings(sampling: SamplingParams) -> dict[str, Setting]:
    """Return the settings of `sampling` that are worth a name, by field."""
    sizes = setting_bytes(sampling)
    return {name: getattr(sampling, name) for name in sizes if sizes[name] >= MIN_NAMED_BYTES}


def name_setting(field: str, value: Setting) -> SettingName:
    """Return the name of a setting: equal values of one field have equal names."""
    ordered = sorted(value) if isinstance(value, frozenset) else value
    content = field.encode() + b"\0" + _ENCODER.encode(ordered)
    digest = hashlib.blake2b(content, digest_size=24).digest()
    return SettingName(digest, _num_bytes(value))


def _num_bytes(value: Setting) -> int:
    """Return about how much memory a setting takes."""
    if isinstance(value, Grammar):
        return (
            len(value.text) * (1 if value.text.isascii() else _CHAR_BYTES)
            + (len(value.end_ids) + len(value.triggers)) * _INT_BYTES
        )
    if isinstance(value, dict):
        return len(value) * _ENTRY_BYTES
    if isinstance(value, list) and value and isinstance(value[0], list):
        return sum(_LIST_BYTES + _INT_BYTES * len(word) for word in value if isinstance(word, list))
    return len(value) * _INT_BYTES


_SentNames = SizedMap[SettingName, bool]
"""Names of the settings that one worker was sent."""


class SentSettings:
    """Remembers the settings that each worker was sent, the most recently used last, so that a task
    only names them. It knows one epoch of each worker.

    It may be wrong: a message was lost, or the worker does not keep a setting any more. Then the
    worker refuses the task, and the next task carries the setting. Owned by the attempt tracker.
    """

    def __init__(self) -> None:
        self._sent: dict[str, tuple[WorkerRef, _SentNames]] = {}
        self._names: BoundedMap[int, tuple[Setting, SettingName]] = BoundedMap(MAX_NAMES)

    def shortened(self, task: RequestTask, worker: WorkerRef) -> RequestTask:
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
        """Forget which settings a worker was sent."""
        self._sent.pop(worker_id, None)

    def _kept(self, worker: WorkerRef) -> _SentNames:
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


class KeptSettings:
    """Keeps the settings that this worker was sent, by name, the most recently used last. Requests
    that name them share one object.

    Bounded by bytes. A setting that is dropped here stays alive in the requests that use it. Owned
    by the instance.
    """

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._kept: SizedMap[tuple[str, SettingName], Setting] = SizedMap(
            max_bytes, lambda key: key[1].num_bytes
        )

    @property
    def num_bytes(self) -> int:
        return self._kept.size

    def completed(self, task: RequestTask) -> RequestTask | None:
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
