"""Clusters whose workers are two processes each, of one shape and of mixed ones: the tokens of one
process, kill -9 of every rank in mid-stream, ranks that stand still, and nothing left behind.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

import mooncake
from mooncake.base import SamplingParams, Shape
from mooncake.engine.ranks.rank_group import SILENT_S
from mooncake.engine.speculation import ACCEPTED_TOKENS
from mooncake.launch.worker.direct import DirectEngine
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.integration.serve.test_real_processes import prompt, stream
from tests.support.followers import followers
from tests.support.serve.server import Server, serving
from tests.support.waiting import LONG_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ("--kv-cache-memory-bytes", "16MiB", "--kvstore-dram-bytes", "16MiB", "--device", "cpu",
         "--max-model-len", "1024")  # fmt: skip
NGRAM, MTP = (
    ("--speculative-config", json.dumps({"num_speculative_tokens": 3, **method}))
    for method in ({"method": "ngram", "prompt_lookup_min": 1}, {"method": "mtp"})
)
WORKERS = {"kvstore-0", "prefill-0", "decode-0", "decode-1"}
LONG, SHORT = 280, 40
PROMPTS = [prompt(30 + 90 * index, seed=index) for index in range(4)]
FLIGHTS = {  # of each harm: what streams, and what waits in prefill meanwhile
    harm: ([prompt(40, seed=seed), prompt(60, seed=seed + 1)], prompt(200, seed=seed + 2))
    for harm, seed in (("kill followers", 100), ("kill leads", 200), ("stop followers", 300))
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("model")
    mtp = {"num_nextn_predict_layers": 1}
    return init_checkpoint("k2-nano", seed=5, out=home / "nano", dtype="float32", overrides=mtp)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[tuple[int, ...], list[int]]:
    """The tokens that one engine of one process gives to each prompt."""
    asked = [(each, SHORT) for each in PROMPTS]
    for streaming, waiting in FLIGHTS.values():
        asked += [(each, LONG) for each in (*streaming, waiting)]
    with DirectEngine.open(
        str(model), dtype="float32", device="cpu", max_model_len=1024, num_threads=1
    ) as engine:
        greedy = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for _, length in asked
        ]
        found = engine.generate([tokens for tokens, _ in asked], greedy)
    return {tuple(tokens): ids for (tokens, _), ids in zip(asked, found, strict=True)}


@pytest.fixture(scope="module")
def fixed(model: Path) -> list[list[float]]:
    """The log-probabilities that one process gives to its tokens, added in a fixed order."""
    wanted = mooncake.SamplingParams(max_tokens=SHORT, temperature=0, ignore_eos=True, logprobs=0)
    with mooncake.LLM(
        str(model), device="cpu", deterministic=True, dtype="float32", max_model_len=1024,
        kv_cache_memory_bytes="16MiB",
    ) as llm:  # fmt: skip
        answers = [each.outputs[0] for each in llm.generate(PROMPTS, wanted)]
    return [
        [each[token].logprob for token, each in zip(answer.token_ids, answer.logprobs, strict=True)]
        for answer in answers
    ]


def logprobs_of(server: Server, tokens: list[int]) -> list[float]:
    """Return the log-probabilities of the tokens that continue these."""
    greedy = {"max_tokens": SHORT, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    found: list[float] = server.complete(tokens, **greedy)["choices"][0]["logprobs"][
        "token_logprobs"
    ]
    return found


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("ranks")
    counts = ["--prefill", "1", "--decode", "2", "-tp", "2", "-dcp", "2"]
    own = ["--rank-backend", "gloo", "--push-checksums", "on"]  # memories of their own
    with serving(str(model), *counts, *own, *NGRAM, *SMALL, log=home / "log") as running:
        yield running
    assert followers() == []


def whole(server: Server) -> bool:
    status = server.status()
    up = {worker["id"] for worker in status["workers"] if worker["state"] == "up"}
    return up == WORKERS and status["load"]["num_inflight"] == 0


def decoding(server: Server) -> str:
    """Return a decode worker that has requests, by its own last word."""
    found: list[str] = []

    def some() -> bool:
        workers = server.status()["workers"]
        of_role = [worker for worker in workers if worker["role"] == "decode"]
        found[:] = [worker["id"] for worker in of_role if worker["load"].get("num_running")]
        return bool(found)

    wait_until(some, "a decode worker has something")
    return found[0]


class Ranks:
    """The processes of one worker."""

    def __init__(self, server: Server, worker: str) -> None:
        self.worker = worker
        self.lead = psutil.Process(server.pid_of(worker))
        [self.follower] = followers(self.lead.pid)

    def left(self) -> list[psutil.Process]:
        return [rank for rank in (self.lead, self.follower) if rank.is_running()]


@contextmanager
def flight(
    server: Server, harm: str, alone: dict[tuple[int, ...], list[int]]
) -> Iterator[tuple[Ranks, Ranks]]:
    """Stream from decode workers, and have a request wait for a prefill rank that stands still;
    yield that prefill worker and a decode worker that streams. Afterwards every client has the
    tokens of one process, and all workers are back.
    """
    wait_until(lambda: whole(server), "all workers up and idle")
    streaming, waiting = FLIGHTS[harm]
    prefill, begun = Ranks(server, "prefill-0"), threading.Semaphore(0)
    with ThreadPoolExecutor(3) as pool:
        answers = {
            tuple(tokens): pool.submit(stream, server, tokens, LONG, begun=begun)
            for tokens in streaming
        }
        for _ in streaming:
            assert begun.acquire(timeout=LONG_S)
        decode = Ranks(server, decoding(server))
        prefill.follower.send_signal(signal.SIGSTOP)
        answers[tuple(waiting)] = pool.submit(stream, server, waiting, LONG)
        wait_until(lambda: server.status()["load"]["num_prefilling"], "one is in prefill")
        yield prefill, decode
        found = {tokens: answer.result(LONG_S) for tokens, answer in answers.items()}
    assert [answer["ends"] for answer in found.values()] == [["length"]] * 3
    for tokens, answer in found.items():
        assert answer["ids"] == alone[tokens]
    wait_until(lambda: whole(server), "started again and idle")
    for worker in (prefill, decode):
        assert not worker.left(), "a rank outlived its worker"


def test_tokens_are_those_of_one_process(
    server: Server, alone: dict[tuple[int, ...], list[int]]
) -> None:
    check_tokens(server, alone)
    check_drafts(server)
    for worker in WORKERS - {"kvstore-0"}:
        lead = psutil.Process(server.pid_of(worker))
        [follower] = followers(lead.pid)
        assert "fork_server" in " ".join(lead.parent().cmdline())
        assert follower.ppid() == lead.ppid(), "forked from the same process"


def check_tokens(server: Server, alone: dict[tuple[int, ...], list[int]]) -> None:
    for _ in range(2):  # the second time from the pool and the prefix cache
        for tokens in PROMPTS:
            assert stream(server, tokens, SHORT)["ids"] == alone[tuple(tokens)]


def check_drafts(server: Server) -> None:
    counters = [worker["load"]["counters"] for worker in server.status()["workers"]]
    assert sum(each.get(ACCEPTED_TOKENS, 0) for each in counters) > 0


def test_kill_9_of_followers_in_mid_stream(
    server: Server, alone: dict[tuple[int, ...], list[int]]
) -> None:
    with flight(server, "kill followers", alone) as workers:
        for worker in workers:
            worker.follower.kill()


def test_kill_9_of_leads_in_mid_stream(
    server: Server, alone: dict[tuple[int, ...], list[int]]
) -> None:
    """Their followers end with them, also that of prefill, which stands still."""
    with flight(server, "kill leads", alone) as workers:
        for worker in workers:
            worker.lead.kill()


def test_ranks_that_stand_still_are_found_out(
    server: Server, alone: dict[tuple[int, ...], list[int]]
) -> None:
    """By their silence, before an exchange is given up; their requests go on elsewhere."""
    with flight(server, "stop followers", alone) as (prefill, decode):
        decode.follower.send_signal(signal.SIGSTOP)
        wait_until(lambda: not (prefill.left() or decode.left()), "their workers end")
        for worker in (prefill, decode):
            told = rf"{worker.worker}\b.* gave no sign of life for {SILENT_S:g} s"
            wait_until(lambda told=told: re.search(told, server.output), f"the log has {told}")


@pytest.mark.parametrize(
    ("prefill", "decode", "drafts"),
    [
        ("tp2-dcp2", "tp2", MTP),
        ("tp1-pp2", "tp2-dcp2", NGRAM),
        ("tp1-dp2-ep2", "tp1", ()),
        ("tp2-ep2", "tp2-dp2-ep4", MTP),
    ],
)
def test_prefill_and_decode_of_different_shape(
    model: Path,
    alone: dict[tuple[int, ...], list[int]],
    tmp_path: Path,
    prefill: str,
    decode: str,
    drafts: tuple[str, ...],
) -> None:
    """Blocks written by one shape are read by the other: pushed, and the second time from the pool
    or the prefix cache. Chunks are shorter than prompts. With drafts or without. More pairs of
    shapes, block by block, are in `cluster/test_rank_memories.py`.
    """
    shapes = {"prefill": Shape.parse(prefill), "decode": Shape.parse(decode)}
    with serving(str(model), *flags_of(shapes), *drafts, *SMALL, log=tmp_path / "log") as server:
        check_tokens(server, alone)
        if drafts:
            check_drafts(server)
        for role, shape in shapes.items():
            assert len(followers(server.pid_of(f"{role}-0"))) == shape.num_ranks - 1


def flags_of(shapes: dict[str, Shape]) -> list[str]:
    flags = ["--max-num-batched-tokens", "128", "--max-num-seqs", "16"]
    for role, shape in shapes.items():
        flags += [f"--{role}-set", f"tensor-parallel-size={shape.tp}"]
        flags += [f"--{role}-set", f"pipeline-parallel-size={shape.pp}"]
        flags += [f"--{role}-set", f"decode-context-parallel-size={shape.dcp}"]
        flags += [f"--{role}-set", f"data-parallel-size={shape.dp}"]
    experts = max(shape.experts for shape in shapes.values())
    shares = experts or any(shape.ep > 1 for shape in shapes.values())
    return [*flags, *(["-ep"] if shares else []), "--experts", str(experts)]


def await_end(processes: list[psutil.Process]) -> None:
    wait_until(lambda: not any(each.is_running() for each in processes), f"{processes} to end")


def check_who_is_slow(
    server: Server, alone: dict[tuple[int, ...], list[int]], quick: str, slow: str
) -> None:
    """Have `slow` run in every fourth moment only, until `quick` tells that it waits for it."""
    process, over = psutil.Process(server.pid_of(slow)), threading.Event()

    def in_turns() -> None:
        while not over.wait(0.1):
            process.suspend()
            over.wait(0.3)
            process.resume()

    def told() -> bool:
        check_tokens(server, alone)
        [counters] = [
            each["load"]["counters"] for each in server.status()["workers"] if each["id"] == quick
        ]
        return f"expert_slow_s_{slow}" in counters

    with ThreadPoolExecutor(1) as pool:
        turns = pool.submit(in_turns)
        try:
            wait_until(told, f"{quick} to name {slow}")
        finally:
            over.set()
            turns.result()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_workers_that_share_experts(
    model: Path,
    alone: dict[tuple[int, ...], list[int]],
    fixed: list[list[float]],
    tmp_path: Path,
    backend: str,
) -> None:
    """One alone has requests, then both; one that is slow is named; one that is killed, or stands
    still and is named, ends both, once, and both come back.
    With fixed sums and experts that move meanwhile, log-probabilities have the bits of one process.
    """
    shapes = {"prefill": Shape(), "decode": Shape(dp=2, ep=2)}
    flags = [*flags_of(shapes), "--rank-backend", backend]
    if backend == "gloo":
        eplb = {"window_size": 4, "step_interval": 8, "num_redundant_experts": 4}
        flags += ["--deterministic", "--enable-eplb", "--eplb-config", json.dumps(eplb)]
    both = ["decode-0", "decode-1"]
    with serving(str(model), *flags, *SMALL, log=tmp_path / "log") as server:

        def all_up() -> bool:
            up = {each["id"] for each in server.status()["workers"] if each["state"] == "up"}
            return up == {*both, "prefill-0", "kvstore-0"} and (
                server.status()["load"]["num_inflight"] == 0
            )

        check_tokens(server, alone)
        if backend == "gloo":
            check_who_is_slow(server, alone, *both)
            for _ in range(3):
                with ThreadPoolExecutor(len(PROMPTS)) as pool:
                    assert list(pool.map(partial(logprobs_of, server), PROMPTS)) == fixed
            for worker in server.status()["workers"]:
                if worker["role"] == "decode":
                    assert worker["load"]["counters"]["expert_moves"]
        harms = [(both[0], signal.SIGKILL), (both[1], signal.SIGKILL), (both[1], signal.SIGSTOP)]
        for (victim, harm), (streaming, _) in zip(
            harms if backend == "shm" else [], FLIGHTS.values(), strict=False
        ):
            wait_until(all_up, "all workers up and idle")
            workers = [psutil.Process(server.pid_of(worker)) for worker in both]
            begun = threading.Semaphore(0)
            with ThreadPoolExecutor(len(streaming)) as pool:
                answers = [
                    pool.submit(stream, server, tokens, LONG, begun=begun) for tokens in streaming
                ]
                for _ in streaming:
                    assert begun.acquire(timeout=LONG_S)
                psutil.Process(server.pid_of(victim)).send_signal(harm)
                found = [answer.result(LONG_S) for answer in answers]
            assert [answer["ends"] for answer in found] == [["length"]] * len(streaming)
            assert [answer["ids"] for answer in found] == [alone[tuple(each)] for each in streaming]
            await_end(workers)
        if backend == "shm":
            told = "decode-1, which shares experts with this worker, has said nothing"
            wait_until(lambda: told in server.output, "the one that stood still is named")


@pytest.mark.parametrize("words", ["tp1-experts1", "tp1-dp2-experts2"])
def test_attention_and_experts_apart(
    model: Path,
    alone: dict[tuple[int, ...], list[int]],
    fixed: list[list[float]],
    tmp_path: Path,
    words: str,
) -> None:
    """Tokens are those of one process, with fixed sums bit for bit. A worker with experts gets no
    requests and has no KV. One that is killed in mid-stream ends all it steps with; requests go on
    once they are back, each with one end.
    """
    shape = Shape.parse(words)
    flags = flags_of({"prefill": Shape(), "decode": shape})
    if shape.experts > 1:
        eplb = {"window_size": 4, "step_interval": 8, "num_redundant_experts": 4}
        flags += ["--deterministic", "--enable-eplb", "--eplb-config", json.dumps(eplb)]
    decodes = [f"decode-{number}" for number in range(shape.dp)]
    experts = [f"experts-{number}" for number in range(shape.experts)]
    everyone = {*decodes, *experts, "prefill-0", "kvstore-0"}
    with serving(str(model), *flags, *SMALL, log=tmp_path / "log") as server:

        def all_up() -> bool:
            status = server.status()
            up = {each["id"] for each in status["workers"] if each["state"] == "up"}
            return up == everyone and status["load"]["num_inflight"] == 0

        wait_until(all_up, "all workers up")
        check_tokens(server, alone)
        if shape.experts > 1:
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                assert list(pool.map(partial(logprobs_of, server), PROMPTS)) == fixed
        loads = {each["id"]: each["load"] for each in server.status()["workers"]}
        for name in experts:
            assert not loads[name].get("num_total_blocks")
            assert loads[name]["counters"]["expert_waited_s"] > 0
            if shape.experts > 1:
                assert loads[name]["counters"]["expert_moves"]
        [streaming, _], workers = (
            FLIGHTS["kill leads"],
            [psutil.Process(server.pid_of(worker)) for worker in (*decodes, *experts)],
        )
        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(len(streaming)) as pool:
            answers = [
                pool.submit(stream, server, tokens, LONG, begun=begun) for tokens in streaming
            ]
            for _ in streaming:
                assert begun.acquire(timeout=LONG_S)
            psutil.Process(server.pid_of(experts[0])).kill()
            found = [answer.result(LONG_S) for answer in answers]
        assert [answer["ends"] for answer in found] == [["length"]] * len(streaming)
        assert [answer["ids"] for answer in found] == [alone[tuple(each)] for each in streaming]
        await_end(workers)
        wait_until(all_up, "all workers up again")


def test_kill_9_of_stages_in_mid_stream(
    model: Path, alone: dict[tuple[int, ...], list[int]], tmp_path: Path
) -> None:
    """Of the last stage, which leads, then of the first one: streams go on in the other worker.
    Each stage keeps its layers in a memory of its own.
    """
    shapes = {"prefill": Shape(pp=2), "decode": Shape(pp=2)}
    flags = [*flags_of(shapes), "--decode", "2", "--rank-backend", "gloo"]
    with serving(str(model), *flags, *SMALL, log=tmp_path / "log") as server:
        for which, (streaming, _) in zip((0, 1), FLIGHTS.values(), strict=False):
            wait_until(lambda: whole(server), "all workers up and idle")
            begun = threading.Semaphore(0)
            with ThreadPoolExecutor(len(streaming)) as pool:
                answers = [
                    pool.submit(stream, server, tokens, LONG, begun=begun) for tokens in streaming
                ]
                for _ in streaming:
                    assert begun.acquire(timeout=LONG_S)
                worker = Ranks(server, decoding(server))
                (worker.lead, worker.follower)[which].kill()
                found = [answer.result(LONG_S) for answer in answers]
            assert [answer["ends"] for answer in found] == [["length"]] * len(streaming)
            assert [answer["ids"] for answer in found] == [alone[tuple(each)] for each in streaming]
            wait_until(lambda lost=worker: not lost.left(), "no rank outlives its worker")
        check_tokens(server, alone)


def test_deterministic_logprobs_are_those_of_one_process(model: Path) -> None:
    """In bfloat16, of several requests at once, the second time from caches, of two ranks also with
    drafts; bit for bit.
    """
    wanted = mooncake.SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logprobs=3)
    settings = {"device": "cpu", "deterministic": True, "dtype": "bfloat16", "max_model_len": 1024}
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1})
    found = []
    for own in ({}, {"tensor_parallel_size": 2, "speculative_config": drafts}):
        with mooncake.LLM(str(model), kv_cache_memory_bytes="16MiB", **settings, **own) as llm:
            for prompts in (PROMPTS, PROMPTS[::-1]):
                answers = [each.outputs[0] for each in llm.generate(prompts, wanted)]
                found.append({tuple(each.token_ids): each.logprobs for each in answers})
    assert found == found[:1] * 4
