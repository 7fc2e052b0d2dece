"""An engine whose first stage is on another machine with emulated GPUs, which a host of ranks there
lends: tokens are those of one rank on the CPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from mooncake.base import InternalError, SamplingParams, Shape
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.host import machine_facts
from mooncake.launch.worker.ranks import rank_host
from mooncake.launch.worker.ranks.far_ranks import FarStages
from mooncake.launch.worker.ranks.rank_host import RankHost
from tests.device import served as opening
from tests.device.served import Joins, prompt, served
from tests.device.test_ranks import CAPTURED, EAGER
from tests.support.cuda.install import emulated
from tests.support.cuda.ops import reference_ops
from tests.support.cuda.processes import followers_emulated
from tests.support.cuda.streams import RANDOM
from tests.support.followers import followers

pytestmark = pytest.mark.usefixtures("forked")
HOST = "127.0.0.2"
CREDENTIAL = own_credential("hush", CredentialRole.WORKER, name="test")
JOINS: Joins = {
    0: [
        (prompt(5, 0), SamplingParams(temperature=0, max_tokens=8, num_logprobs=1)),
        (prompt(37, 1), SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=9)),
    ],
    2: [(prompt(14, 2), SamplingParams(temperature=0, max_tokens=5))],
}


@contextmanager
def ranks_at(host: str) -> Iterator[FarStages]:
    """Have a host of ranks there; yield what starts an engine's first stage on it."""
    made = RankHost(host, 0, CREDENTIAL)
    serving = threading.Thread(target=made.run)
    serving.start()
    try:
        yield FarStages(((host, made.port),), "127.0.0.1", CREDENTIAL)
    finally:
        made.close()
        made.finish(60.0)
        serving.join(60.0)
    assert not serving.is_alive()


@pytest.mark.parametrize(("words", "backend"), [("tp2-pp2", EAGER), ("tp1-pp2", CAPTURED)])
def test_a_stage_on_gpus_elsewhere_has_the_tokens_of_one_rank_on_the_cpu(
    nano: Path, monkeypatch: pytest.MonkeyPatch, words: str, backend: str
) -> None:
    with served(nano, "cpu") as engine:
        wanted = engine.run(JOINS), engine.logprobs
    shape = Shape.parse(words)
    machine = {"num_devices": shape.tp, "order": RANDOM, "seed": 7}
    names = [str(number) for number in range(shape.tp)]
    monkeypatch.setattr(machine_facts, "seen_gpus", lambda: list(names))
    with (
        emulated(**machine) as gpus,
        followers_emulated(as_references=True, **machine),
        reference_ops(),
        mock.patch.object(rank_host, "start_follower", wraps=rank_host.start_follower) as started,
        ranks_at(HOST) as far,
    ):
        start = functools.partial(opening.start_ranks, far=far)
        monkeypatch.setattr(opening, "start_ranks", start)
        with served(nano, "cuda", backend, shape=shape, measure_pages=True) as engine:
            assert engine.run(JOINS) == wanted[0]
            assert engine.logprobs[0] == pytest.approx(wanted[1][0], abs=1e-4)
            engine.engine.check_integrity([], [])
        gpus.finish()
        given = [call.args[-1] for call in started.call_args_list]
        assert sorted(given) == names, "each rank there has a GPU of its own"


def test_a_machine_without_a_free_gpu_starts_no_rank(
    nano: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine_facts, "seen_gpus", list)
    machine = {"num_devices": 1}
    with (
        emulated(**machine),
        followers_emulated(as_references=True, **machine),
        reference_ops(),
        ranks_at(HOST) as far,
    ):
        start = functools.partial(opening.start_ranks, far=far)
        monkeypatch.setattr(opening, "start_ranks", start)
        with (
            pytest.raises(InternalError, match=r"rank 1 ended (before|while) it loaded its part"),
            served(nano, "cuda", EAGER, shape=Shape(pp=2)),
        ):
            pass
        assert followers() == []
    assert "no GPU of this machine is free" in caplog.text
