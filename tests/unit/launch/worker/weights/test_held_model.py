"""The model of a process: kept, dropped, opened again, and compared with what is to replace it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.base import CheckpointError, KvLayout, ModelSpec, Role, WorkerRef
from mooncake.base.cluster_mode import ClusterMode, Weights
from mooncake.base.messages import CheckWeights, NextLife
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.launch.worker.weights.held_model import HeldModel
from mooncake.model.checkpoint.files.signature import Signature
from tests.support.model.specs import small_config
from tests.support.serve.plain_settings import worker_settings

SPEC = ModelSpec.from_config(small_config())
TENSORS = {"model.norm.weight": ("BF16", (8,))}
LAYOUT = KvLayout.for_model(SPEC, block_tokens=4, dtype="float32", weights_revision="r1")

NEW = CheckWeights(asker=WorkerRef("g", "1", "tcp://g"), ticket=1, model="/new")


class Source:
    """A source of a model that is not there."""

    signature = Signature(SPEC, TENSORS)
    can_rest = True

    def __init__(self, path: str) -> None:
        self.path = path
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Bed:
    def __init__(self) -> None:
        self.opened: list[Source] = []
        self.found = {"/new": (Source.signature, "r2")}
        self.model = HeldModel(self._open, lambda asked: self.found[asked.model])  # type: ignore[arg-type]

    def _open(self, path: str, _: str) -> Any:
        assert all(source.closed for source in self.opened), "never both are in memory"
        self.opened.append(Source(path))
        return self.opened[-1]


@pytest.fixture
def settings() -> WorkerSettings:
    return worker_settings(model="/old", weights_revision="r1", layout=LAYOUT)


def test_a_source_is_opened_once_for_each_revision(settings: WorkerSettings) -> None:
    bed = Bed()
    first = bed.model.use(settings)
    assert bed.model.use(settings) is first
    again = msgspec.structs.replace(settings, weights_revision="r2")
    assert bed.model.use(again) is not first, "the files were written over"
    bed.model.close()
    assert all(source.closed for source in bed.opened)


def test_level_one_keeps_the_source_and_level_two_drops_it(settings: WorkerSettings) -> None:
    bed = Bed()
    first = bed.model.use(settings)
    assert bed.model.rest(1) == 1
    assert bed.model.use(settings) is first
    assert bed.model.rest(2) == 2
    assert bed.opened[0].closed
    assert bed.model.use(settings) is not first


def test_what_cannot_be_kept_is_dropped_at_level_one_too(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "can_rest", False)
    bed = Bed()
    bed.model.use(settings)
    assert bed.model.rest(1) == 2
    assert bed.opened[0].closed


def test_checked_weights_have_the_layout_that_a_new_cluster_would_have(
    settings: WorkerSettings,
) -> None:
    bed = Bed()
    bed.model.use(settings)
    bed.model.rest(2)
    revision, fingerprint = bed.model.check(NEW, LAYOUT)
    fresh = KvLayout.for_model(SPEC, block_tokens=4, dtype="float32", weights_revision="r2")
    assert (revision, fingerprint) == ("r2", fresh.fingerprint)


@pytest.mark.parametrize(
    ("signature", "problem"),
    [
        (
            Signature(msgspec.structs.replace(SPEC, vocab_size=7), TENSORS),
            "/new/config.json: vocab_size is 7",
        ),
        (Signature(SPEC, {}), r"model.norm.weight is missing, and in .* BF16 \[8\]"),
        (Signature(SPEC, {"model.norm.weight": ("F32", (8,))}), r"is F32 \[8\]"),
        (Signature(SPEC, {"model.norm.weight": ("BF16", (9,))}), r"is BF16 \[9\]"),
        (Signature(SPEC, {**TENSORS, "more": ("BF16", (1,))}), "tensor more is BF16"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    settings: WorkerSettings, signature: Signature, problem: str
) -> None:
    bed = Bed()
    bed.model.use(settings)
    bed.model.rest(1)
    bed.found["/new"] = (signature, "r2")
    with pytest.raises(CheckpointError, match=problem):
        bed.model.check(NEW, LAYOUT)


def test_a_worker_comes_back_as_it_was_told(settings: WorkerSettings) -> None:
    assert settings.next(NextLife(role=Role.PREFILL)).role is Role.PREFILL
    asleep = settings.next(NextLife(mode=ClusterMode(1, "g", sleep_level=1)))
    assert asleep.sleeps
    assert (asleep.model, asleep.layout) == ("/old", LAYOUT)
    weights = Weights(1, "/new", "r2", "f2")
    awake = asleep.next(NextLife(mode=ClusterMode(2, "g", weights=weights)))
    assert not awake.sleeps
    assert (awake.model, awake.weights_revision) == ("/new", "r2")
    assert awake.layout == msgspec.structs.replace(LAYOUT, fingerprint="f2")
    pool = msgspec.structs.replace(asleep, role=Role.KVSTORE)
    assert not pool.sleeps


def test_a_gateway_that_has_not_heard_of_the_newest_weights_takes_none_back(
    settings: WorkerSettings,
) -> None:
    first, second = Weights(1, "/new", "r2", "f2"), Weights(1, "/other", "r3", "f3")
    new = settings.next(NextLife(mode=ClusterMode(2, "g", weights=first)))
    other = new.next(NextLife(mode=ClusterMode(3, "h", weights=second)))
    assert (other.model, other.mode.weights) == ("/other", second), "of one number, the later name"
    again = other.next(NextLife(mode=ClusterMode(4, "g", paused=True, weights=first)))
    assert (again.model, again.layout.fingerprint) == ("/other", "f3")
    assert again.mode == ClusterMode(4, "g", paused=True, weights=second)
