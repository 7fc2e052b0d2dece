"""The kept self-profile: verified by few steps, timed anew if these disagree, never in the way."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.base import CostSample, Role
from mooncake.launch.worker.kept_profile import (
    AGREE,
    MAX_AGE_S,
    NUM_VERIFIED,
    UNDISTURBED,
    place_of_profile,
    timed_or_kept,
)
from mooncake.launch.worker.profile import Shape
from mooncake.model.options import ModelOptions
from tests.support.serve.plain_settings import worker_settings

SHAPES: list[Shape] = [(1, 32, 0), (1, 64, 0), (1, 128, 0), (1, 256, 0), (1, 512, 0)]


class Machine:
    """Takes a millisecond for a token, times `slower`, and times what `odd` says for a shape. The
    process gets `share` of a core.
    """

    def __init__(self) -> None:
        self.slower = 1.0
        self.odd: dict[Shape, float] = {}
        self.share = 1.0
        self.timed: list[Shape] = []
        self._now_s = 0.0

    def time_steps(self, shapes: Sequence[Shape]) -> list[CostSample]:
        self.timed = list(shapes)
        return [CostSample(new, 0, 1, self._run((_, new, old))) for _, new, old in shapes]

    def _run(self, shape: Shape) -> float:
        took_s = shape[1] / 1000 * self.slower * self.odd.get(shape, 1.0)
        self._now_s += took_s
        return took_s

    def start(self, place: Path | None) -> list[float]:
        """Return the seconds that a start finds for `SHAPES`."""
        found = timed_or_kept(
            SHAPES, self.time_steps, place,
            clock=lambda: self._now_s, cpu_clock=lambda: self._now_s * self.share,
        )  # fmt: skip
        assert [(each.num_sequences, each.num_new_tokens, 0) for each in found] == SHAPES
        return [each.seconds for each in found]


PLAIN = [pytest.approx(new / 1000) for _, new, _ in SHAPES]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "steps-1.json"


def test_a_later_start_times_the_first_steps_only(place: Path) -> None:
    machine = Machine()
    assert machine.start(place) == PLAIN
    assert machine.timed == SHAPES
    assert machine.start(place) == PLAIN
    assert machine.timed == SHAPES[:NUM_VERIFIED]


def test_kept_times_are_those_of_the_machines_present_speed(place: Path) -> None:
    machine = Machine()
    machine.start(place)
    machine.slower = 3.0
    assert machine.start(place) == [pytest.approx(3 * new / 1000) for _, new, _ in SHAPES]
    assert machine.timed == SHAPES[:NUM_VERIFIED]


@pytest.mark.parametrize("number", range(NUM_VERIFIED))
def test_all_are_timed_anew_where_the_first_ones_disagree(place: Path, number: int) -> None:
    disturbed = Machine()
    disturbed.odd = {SHAPES[number]: AGREE * 1.01}
    disturbed.start(place)
    machine = Machine()
    assert machine.start(place) == PLAIN
    assert machine.timed == SHAPES
    machine.start(place)
    assert machine.timed == SHAPES[:NUM_VERIFIED], "the new times were not kept"


def test_times_of_a_disturbed_process_are_not_kept(place: Path) -> None:
    machine = Machine()
    machine.share = UNDISTURBED * 0.99
    assert machine.start(place) == PLAIN
    assert not place.exists()
    machine.share = UNDISTURBED * 1.01
    machine.start(place)
    assert place.exists()


def test_old_times_are_neither_used_nor_left(place: Path) -> None:
    machine = Machine()
    other = place.with_name("steps-2.json")
    machine.start(other)
    machine.start(place)
    for file in (place, other):
        then_s = file.stat().st_mtime - MAX_AGE_S - 1
        os.utime(file, (then_s, then_s))
    machine.start(place)
    assert machine.timed == SHAPES
    assert os.listdir(place.parent) == [place.name]


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"{}", b"[]", b"[[32, 0, 1]]", b"[[32, 0, 1, 0.0]]" * 2, b'[["a", 0, 1, 1.0]]'],
)
def test_a_damaged_file_costs_time_and_nothing_else(place: Path, content: bytes) -> None:
    place.write_bytes(content)
    machine = Machine()
    assert machine.start(place) == PLAIN
    assert machine.timed == SHAPES
    machine.start(place)
    assert machine.timed == SHAPES[:NUM_VERIFIED]


def test_a_kept_time_that_is_none_is_not_used(place: Path) -> None:
    machine = Machine()
    machine.start(place)
    samples = msgspec.json.decode(place.read_bytes())
    samples[-1][3] = 0.0
    place.write_bytes(msgspec.json.encode(samples))
    assert machine.start(place) == PLAIN
    assert machine.timed == SHAPES


def test_a_folder_that_is_missing_keeps_nothing(tmp_path: Path) -> None:
    machine = Machine()
    assert machine.start(tmp_path / "none" / "steps-1.json") == PLAIN
    assert machine.start(None) == PLAIN
    assert machine.timed == SHAPES


def settings(tmp_path: Path, **changes: Any) -> Any:
    return worker_settings(options=ModelOptions(cache_dir=str(tmp_path)), **changes)


def test_what_changes_the_time_of_a_step_has_a_file_of_its_own(tmp_path: Path) -> None:
    plain = settings(tmp_path)
    engine = plain.engine
    threads = msgspec.structs.replace(plain.options, num_threads=3)
    places = [
        place_of_profile(plain, engine, "this CPU"),
        place_of_profile(plain, engine, "another CPU"),
        place_of_profile(settings(tmp_path, role=Role.PREFILL), engine, "this CPU"),
        place_of_profile(settings(tmp_path, dtype="bfloat16"), engine, "this CPU"),
        place_of_profile(settings(tmp_path, weights_revision="s"), engine, "this CPU"),
        place_of_profile(worker_settings(options=threads), engine, "this CPU"),
        place_of_profile(plain, dataclasses.replace(engine, max_num_seqs=2), "this CPU"),
    ]
    assert None not in places
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("num_homes", [1, 2])
def test_pages_and_names_make_no_difference(tmp_path: Path, num_homes: int) -> None:
    plain = settings(tmp_path).engine
    engine = dataclasses.replace(plain, num_blocks=16 * num_homes, num_homes=num_homes)
    more = dataclasses.replace(engine, num_blocks=17 * num_homes)
    assert place_of_profile(settings(tmp_path), engine, "") == place_of_profile(
        settings(tmp_path, worker_id="decode-1", gateway_address="tcp://127.0.0.1:2"), more, ""
    )


@pytest.mark.parametrize("options", [ModelOptions(), ModelOptions(cache_dir="c", device="cuda")])
def test_nothing_is_kept_for_a_gpu_or_without_a_folder(options: ModelOptions) -> None:
    plain = worker_settings(options=options)
    assert place_of_profile(plain, plain.engine, "") is None
