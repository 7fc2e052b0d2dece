"""An engine of several processes: the tokens of one, one end for all, nothing left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooncake.base import CheckpointError, InternalError, SamplingParams
from mooncake.launch.worker.direct import DirectEngine
from mooncake.launch.worker.ranks import rank_processes
from mooncake.launch.worker.ranks.rank_processes import of_follower
from mooncake.model.checkpoint.making.convert import convert_checkpoint
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.options import ModelOptions
from tests.support.followers import followers, forked_by, forks

NUM_PROMPTS, NUM_OUTPUT = 32, 20
SETTINGS = {
    "dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 512,
    "kv_cache_memory_bytes": "16MiB", "max_num_batched_tokens": 256,
}  # fmt: skip
MIXED = [(2, 2, "auto", 2)]
"""Tensors, contexts and layers in parts: where weights are cut otherwise, this shows it."""
EVERY_SHAPE = [(2, 1), (4, 1), (2, 1, "gloo"), (2, 2), (1, 1, "auto", 2), *MIXED]
"""Contexts and stages by gloo are in `serve/test_rank_processes.py`."""
CONFIGS: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {
    "queries not compressed": ({"q_lora_rank": None}, MIXED),
    "group-limited routing": ({"n_group": 4, "topk_group": 2}, MIXED),
    "yarn": ({}, EVERY_SHAPE),
}
WIDE = {
    "moe_intermediate_size": 256, "intermediate_size": 256, "num_attention_heads": 4,
    "v_head_dim": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
}  # fmt: skip


def nano(folder: Path, **overrides: Any) -> Path:
    return init_checkpoint("k2-nano", 5, folder, dtype="float32", overrides=overrides)


def prompts() -> list[list[int]]:
    choose = random.Random(11)
    return [
        [choose.randrange(512) for _ in range(choose.randrange(1, 100))] for _ in range(NUM_PROMPTS)
    ]


def tokens_of(
    path: Path,
    num_ranks: int,
    num_homes: int = 1,
    rank_backend: str = "auto",
    num_stages: int = 1,
    **settings: Any,
) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    shape = {
        "tensor_parallel_size": num_ranks,
        "decode_context_parallel_size": num_homes,
        "pipeline_parallel_size": num_stages,
        "rank_backend": rank_backend,
    }
    with DirectEngine.open(str(path), **{**SETTINGS, **shape, **settings}) as engine:
        found = engine.generate(prompts(), [greedy] * NUM_PROMPTS)
        engine.check_integrity()
    assert followers() == []
    return found


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with forks(tmp_path_factory.mktemp("forks")) as path:
        yield path


@pytest.fixture
def forked(fork_server: Path) -> Iterator[None]:
    with forked_by(fork_server):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    overrides, shapes = CONFIGS[name]
    path = nano(tmp_path / "nano", **overrides)
    expected = tokens_of(path, 1)
    assert all(len(tokens) == NUM_OUTPUT for tokens in expected)
    for shape in shapes:
        assert tokens_of(path, *shape) == expected
    if shapes is EVERY_SHAPE:  # chunks of a prompt follow one another
        short = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
        assert tokens_of(path, 1, num_stages=2, **short) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_quantized_checkpoints_give_the_tokens_of_one_rank(kind: str, tmp_path: Path) -> None:
    path = convert_checkpoint(nano(tmp_path / "nano", **WIDE), tmp_path / kind, kind)
    assert tokens_of(path, 2) == tokens_of(path, 2, 2) == tokens_of(path, 1)


def test_what_one_rank_cannot_load_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    path = nano(tmp_path / "nano")
    before = json.loads((path / "config.json").read_text())
    # A process of its own reads the files later, and finds others.
    start = rank_processes.start_ranks

    def meanwhile(model: str, *arguments: Any) -> Any:
        (path / "config.json").write_text(json.dumps({**before, "hidden_size": 128}))
        return start(model, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "start_ranks", meanwhile)
        with pytest.raises(CheckpointError):
            DirectEngine.open(str(path), tensor_parallel_size=2, **SETTINGS)
    assert followers() == []


def test_ranks_outlive_the_thread_that_opened_them(tmp_path: Path) -> None:
    path = nano(tmp_path / "nano")
    with ThreadPoolExecutor(1) as other:
        opening = other.submit(DirectEngine.open, str(path), tensor_parallel_size=2, **SETTINGS)
        engine = opening.result()
    with engine:
        few = SamplingParams(temperature=0, max_tokens=2)
        assert len(engine.generate([[1, 2]], [few])[0]) == 2
    assert followers() == []


def kill(rank: psutil.Process) -> None:
    rank.kill()


def stop(rank: psutil.Process) -> None:
    os.kill(rank.pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("shape", "rank_backend", "harm", "message"),
    [
        ("tensor", "shm", kill, "rank 1 of this model has ended"),
        ("tensor", "shm", stop, "rank 1 of this model gave no sign of life for 5 s"),
        # Whether the connection or the process is missed first is chance.
        ("tensor", "gloo", kill, "rank 1 of this model has ended|another rank of this model fail"),
        ("tensor", "gloo", stop, "rank 1 of this model gave no sign of life for 5 s"),
        ("pipeline", "shm", kill, "rank 1 of this model has ended|other ranks could not be told"),
        ("pipeline", "shm", stop, "rank 1 of this model gave no sign of life for 5 s"),
        ("pipeline", "gloo", kill, "rank 1 of this model has ended|another rank of this model fa"),
        ("pipeline", "gloo", stop, "rank 1 of this model gave no sign of life for 5 s"),
    ],
)
def test_a_rank_that_is_lost_ends_the_engine(
    shape: str,
    rank_backend: str,
    harm: Callable[[psutil.Process], None],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if (shape, rank_backend) != ("tensor", "shm"):  # whose followers the kernel ends
        request.getfixturevalue("forked")
    monkeypatch.setattr(rank_processes, "SIGN_S", 0.2)
    monkeypatch.setattr(rank_processes, "SILENT_S", 5.0)
    path = nano(tmp_path / "nano")
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    sizes = {f"{shape}_parallel_size": 2, "rank_backend": rank_backend}
    with DirectEngine.open(str(path), **sizes, **SETTINGS) as engine:
        engine.generate([[1, 2]], [SamplingParams(temperature=0, max_tokens=2)])
        [rank] = followers()
        threading.Timer(0.2, harm, [rank]).start()
        with pytest.raises(InternalError, match=message):
            engine.generate([[1, 2]] * 400, [long] * 400)
    assert followers() == []
    assert not psutil.pid_exists(rank.pid)


def test_followers_get_the_weights_key_and_no_other_secret() -> None:
    environ = {"MOONCAKE_CLUSTER_SECRET": "hush", "MOONCAKE_API_KEY": "hush", "PATH": "/bin"}
    environ["MOONCAKE_WEIGHTS_KEY"] = "key"
    given = of_follower(environ, ModelOptions().weights_key)
    assert "hush" not in given.values()
    assert given["MOONCAKE_WEIGHTS_KEY"] == "key"
    assert given["PATH"] == "/bin"
    assert given["OMP_WAIT_POLICY"] == "PASSIVE"
