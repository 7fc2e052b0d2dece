"""The simulator against life: `python -m benchmarks sim-vs-real [--trace FILE]`.

A scaled-down trace is played on a live cluster of this machine (k2-tiny, workers in processes of
their own, KV over shared memory) and by its simulated twin, which knows the workers' self-profile,
what rehearsals with other requests showed, and when requests set out. Both run the same Conductor:
compared are where each request went, its TTFT and the gaps between its tokens. `--rounds` starts
afresh each time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.support.live_cluster import SEED, LiveCluster, Stream, finish, live_cluster
from benchmarks.support.servers import ROOT, family, load, machine, process_cpu_s
from benchmarks.support.simulated_twin import Known, Outcome, Played, Rehearsal, Tuning, Twin
from mooncake.base import GenerateRequest, SamplingParams, pack_tokens
from mooncake.launch.config.plan import ServePlan, make_plan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host.machine_facts import num_cores
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.sim.files import read_trace
from mooncake.sim.results.plots import Line, lines_plot
from mooncake.sim.results.report import comparison_page
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine

BLOCK_TOKENS = 64
SCALE = TRACE_BLOCK_TOKENS // BLOCK_TOKENS
"""A trace's block of 512 tokens becomes one of ours: everything is an eighth as long."""
MAX_MODEL_LEN = 4096
LAST_TOKEN = 4000
SETTLE_S = 1.0
PAUSE_S = 0.3
NUM_ALONE = 16
REHEARSAL_IDS = 1_000_000
"""Added to the block ids of the rehearsal: it shares nothing with the trace."""
WANTED_ERROR = 0.25
TABLE_WIDTH = 180


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster's life beside its simulation. Times in seconds."""

    load_average: float
    busy_elsewhere: float
    """Cores that other processes of this machine kept busy."""
    num_requests: int
    same_prefill: int
    same_cached: int
    """Requests of which as many tokens were reused."""
    ttft_mean: tuple[float, float]
    """Live, simulated; so are the following."""
    ttft_median: tuple[float, float]
    tbt_mean: tuple[float, float]
    tbt_median: tuple[float, float]
    ttft_error: float
    """Median over requests of |simulated / live - 1|."""
    tbt_error: float
    """The same of each request's mean gap."""
    tuning: Tuning
    """What the rehearsals showed of the machine."""
    ttfts: list[tuple[float, float]]
    """The times of first tokens, request by request."""


# ---------------------------------------------------------------- the trace


def synthetic(num_requests: int, seed: int) -> list[TraceLine]:
    """Return conversations over three system prompts: each turn extends what was said before."""
    random, next_id, at_ms = Random(seed), 1000, 0.0
    heads = [list(range(100 * n, 100 * n + blocks)) for n, blocks in enumerate((8, 16, 24), 1)]
    sessions: list[list[int]] = []
    lines = []
    for _ in range(num_requests):
        at_ms += random.expovariate(1.0) * 1e3
        if sessions and random.random() < 0.6:
            past = sessions.pop(random.randrange(len(sessions)))
        else:
            past = random.choice(heads)
        fresh = random.randrange(1, 9)
        ids = [*past, *range(next_id, next_id + fresh)]
        next_id += fresh
        if len(ids) < 48:
            sessions.append(ids)
        lines.append(
            TraceLine(
                timestamp=at_ms,
                input_length=len(ids) * TRACE_BLOCK_TOKENS - random.randrange(400),
                output_length=random.randrange(40, 400),
                hash_ids=ids,
            )
        )
    return lines


def scaled(lines: Sequence[TraceLine], rate: float) -> list[Played]:
    """Return the requests an eighth as long, at `rate` a second on average."""
    duration_s = (lines[-1].timestamp - lines[0].timestamp) / 1e3
    slower = (len(lines) - 1) / rate / duration_s
    return [
        Played(
            at_s=slower * (line.timestamp - lines[0].timestamp) / 1e3,
            request=_request(f"r{number}", line),
        )
        for number, line in enumerate(lines)
    ]


def _request(name: str, line: TraceLine) -> GenerateRequest:
    tokens: list[int] = []
    for hash_id in line.hash_ids:
        tokens += Random(hash_id).choices(range(1, LAST_TOKEN), k=BLOCK_TOKENS)
    return GenerateRequest(
        request_id=name,
        prompt=pack_tokens(tokens[: max(1, line.input_length // SCALE)]),
        sampling=SamplingParams(
            max_tokens=max(2, line.output_length // SCALE), temperature=0.0, ignore_eos=True
        ),
    )


def alone() -> list[GenerateRequest]:
    """Return requests to be served one at a time: every worker is awake before the clock runs."""
    random = Random(1)
    return [
        GenerateRequest(
            request_id=f"alone-{number}",
            prompt=pack_tokens(random.choices(range(1, LAST_TOKEN), k=64 + 128 * number)),
            sampling=SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True),
        )
        for number in range(NUM_ALONE)
    ]


def rehearsal(number: int, num_requests: int, rate: float) -> list[Played]:
    """Return other requests of the same kind; each number names others."""
    first_id = number * REHEARSAL_IDS
    lines = [
        msgspec.structs.replace(line, hash_ids=[first_id + one for one in line.hash_ids])
        for line in synthetic(num_requests, first_id)
    ]
    return [
        msgspec.structs.replace(
            one,
            request=msgspec.structs.replace(
                one.request, request_id=f"rehearsal-{number}-{one.request.request_id}"
            ),
        )
        for one in scaled(lines, rate)
    ]


# ---------------------------------------------------------------- life


def learn(cluster: LiveCluster, before: Sequence[Played]) -> tuple[Known, Rehearsal]:
    """Serve requests one at a time, then those of `before`; return what is measured by the way."""
    lone = _one_by_one(cluster, alone())
    steps = cluster.steps()
    rehearsed = play_live(cluster, before)
    time.sleep(SETTLE_S)
    prefill = [one.seconds for name in steps if name.startswith("prefill") for one in steps[name]]
    decode = [one.seconds for name in steps if name.startswith("decode") for one in steps[name]]
    waits = [stream.token_times_s[0] - stream.submitted_s for stream in lone]
    gaps = [gap for stream in lone for gap in _gaps(stream.token_times_s)]
    known = Known(
        profiles=dict(cluster.machine.profiles),
        alone=steps,
        all=cluster.steps(),
        message_s=max(1e-4, (sum(waits) - sum(prefill)) / len(waits) / 2),
        between_s=max(0.0, statistics.median(gaps) - statistics.median(decode)),
        pool_bytes_per_s=_pool_bytes_per_s(cluster),
    )
    return known, rehearsed


def _one_by_one(cluster: LiveCluster, requests: Sequence[GenerateRequest]) -> list[Stream]:
    streams = []
    for request in requests:
        streams.append(cluster.submit(request))
        finish(streams[-1:])
        time.sleep(PAUSE_S)
    time.sleep(SETTLE_S)
    return streams


def _pool_bytes_per_s(cluster: LiveCluster) -> float:
    """Return how fast prefixes came from pools so far."""
    counters = cluster.machine.counters.values()
    moved = sum(c.get("fetch_local_bytes", 0) + c.get("fetch_remote_bytes", 0) for c in counters)
    seconds = sum(
        c.get("fetch_local_seconds", 0) + c.get("fetch_remote_seconds", 0) for c in counters
    )
    return moved / seconds if moved and seconds else 1e9


def play_live(cluster: LiveCluster, wanted: Sequence[Played]) -> Rehearsal:
    """Return when each request really set out, and what came of it."""
    begin_s, streams = time.monotonic(), {}
    for one in wanted:
        time.sleep(max(0.0, begin_s + one.at_s - time.monotonic()))
        streams[one.request.request_id] = cluster.submit(one.request)
    finish(list(streams.values()))
    first_s = streams[wanted[0].request.request_id].submitted_s
    played = [
        Played(at_s=streams[one.request.request_id].submitted_s - first_s, request=one.request)
        for one in wanted
    ]
    return Rehearsal(played=played, outcomes=outcomes_of(cluster, streams))


def outcomes_of(cluster: LiveCluster, streams: Mapping[str, Stream]) -> dict[str, Outcome]:
    """Return what came of ended requests."""
    placed = cluster.placements()
    found = {}
    for name, stream in streams.items():
        assert stream.final is not None
        found[name] = Outcome(
            prefill=placed[name].prefill,
            decode=placed[name].decode,
            num_cached_tokens=stream.final.num_cached_tokens,
            ttft_s=stream.token_times_s[0] - stream.submitted_s,
            gaps_s=_gaps(stream.token_times_s),
        )
    return found


def _gaps(times_s: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times_s)]


# ---------------------------------------------------------------- side by side


def play_round(
    config: ServeConfig,
    plan: ServePlan,
    wanted: Sequence[Played],
    around: tuple[Sequence[Played], Sequence[Played]],
) -> Round:
    """Start a cluster, play the trace between the two rehearsals `around` it, simulate the same."""
    with live_cluster(config, plan) as cluster:
        known, before = learn(cluster, around[0])
        before_s, own_before_s, start_s = _machine_cpu_s(), _own_cpu_s(), time.monotonic()
        lived = play_live(cluster, wanted)
        took_s = time.monotonic() - start_s
        elsewhere_s = _machine_cpu_s() - before_s - (_own_cpu_s() - own_before_s)
        time.sleep(SETTLE_S)
        after = play_live(cluster, around[1])
    live = lived.outcomes
    twin = Twin(plan, cluster.settings, known, (before, after), SEED)
    simulated = twin.play(lived.played, known.all)
    pairs = [(live[name], simulated[name]) for name in live]
    ttfts = [(a.ttft_s, b.ttft_s) for a, b in pairs]
    gaps = [(statistics.mean(a.gaps_s), statistics.mean(b.gaps_s)) for a, b in pairs]
    return Round(
        load_average=os.getloadavg()[0],
        busy_elsewhere=max(0.0, elsewhere_s / took_s),
        num_requests=len(pairs),
        same_prefill=sum(a.prefill == b.prefill for a, b in pairs),
        same_cached=sum(a.num_cached_tokens == b.num_cached_tokens for a, b in pairs),
        ttft_mean=_both(statistics.mean, ttfts),
        ttft_median=_both(statistics.median, ttfts),
        tbt_mean=_both(statistics.mean, gaps),
        tbt_median=_both(statistics.median, gaps),
        ttft_error=_error(ttfts),
        tbt_error=_error(gaps),
        tuning=twin.tuning,
        ttfts=ttfts,
    )


def _both(
    figure: Callable[[Sequence[float]], float], pairs: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    live, simulated = zip(*pairs, strict=True)
    return figure(live), figure(simulated)


def _error(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(abs(simulated / live - 1) for live, simulated in pairs)


def _machine_cpu_s() -> float:
    """Return the CPU time that this machine has spent at work since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:8]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def _own_cpu_s() -> float:
    return process_cpu_s(family(os.getpid()))


def rows_of(rounds: Sequence[Round]) -> list[list[str]]:
    """Return the table: a round a row, live / simulated."""
    head = [
        "round", "busy elsewhere", "same prefill", "same reuse", "TTFT mean ms", "median ms",
        "median error", "TBT mean ms", "median ms", "median error", "crowding", "paces",
    ]  # fmt: skip

    def both(pair: tuple[float, float], digits: int) -> str:
        return " / ".join(f"{1e3 * value:,.{digits}f}" for value in pair)

    return [
        head,
        *(
            [
                str(number), f"{one.busy_elsewhere:.2f} cores",
                f"{one.same_prefill} of {one.num_requests}",
                f"{one.same_cached} of {one.num_requests}",
                both(one.ttft_mean, 0), both(one.ttft_median, 0), f"{one.ttft_error:.1%}",
                both(one.tbt_mean, 1), both(one.tbt_median, 1), f"{one.tbt_error:.1%}",
                f"{one.tuning.crowding:.1f}",
                f"{one.tuning.prefill_pace:.2f} / {one.tuning.decode_pace:.2f}",
            ]
            for number, one in enumerate(rounds, 1)
        ),
    ]  # fmt: skip


def write_report(path: str, title: str, rounds: Sequence[Round]) -> None:
    """Write the table and each round's TTFTs, request by request, as one page."""
    remark = "Live / simulated. The quietest round is the one with the least work elsewhere."
    figures = []
    for number, one in enumerate(rounds, 1):
        lines = [
            Line(name="live", values=[live for live, _ in one.ttfts]),
            Line(name="simulated", values=[simulated for _, simulated in one.ttfts]),
        ]
        xs = [float(index) for index in range(len(one.ttfts))]
        figures.append((f"Round {number}: TTFT", lines_plot(xs, lines, "request", "seconds")))
    page = comparison_page(title, [("Side by side", rows_of(rounds), remark)], figures)
    Path(path).write_text(page, encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """See the module; 1 when a median error of the quietest round is over 25 %."""
    args = _arguments(argv)
    console = Console(width=TABLE_WIDTH)
    if not (args.model / "config.json").exists():
        init_checkpoint("k2-tiny", 0, args.model)
    config = ServeConfig(
        model=str(args.model), prefill=args.prefill, decode=1, kvstore=args.prefill, num_threads=1,
        max_model_len=MAX_MODEL_LEN, kv_cache_memory_bytes=64 * 2**20,
        kvstore_dram_bytes=128 * 2**20,
    )  # fmt: skip
    plan = make_plan(config, num_cores())
    if args.trace is None:
        lines = synthetic(args.requests, args.seed)
    else:
        trace = read_trace(args.trace)
        fitting = [x for x in trace if x.input_length + x.output_length < MAX_MODEL_LEN * SCALE]
        lines = fitting[: args.requests]
    wanted = scaled(lines, args.rate)
    around = (rehearsal(1, args.rehearsal, args.rate), rehearsal(2, args.rehearsal, args.rate))
    title = (
        f"{args.prefill}P1D of k2-tiny on {machine()}, {len(wanted)} requests, {args.rate:g} a "
        f"second, {'synthetic trace' if args.trace is None else Path(args.trace).name}"
    )
    rounds = []
    for number in range(args.rounds):
        rounds.append(one := play_round(config, plan, wanted, around))
        console.print(
            f"round {number + 1} of {args.rounds}: median error of TTFT {one.ttft_error:.1%}, "
            f"of TBT {one.tbt_error:.1%}, load {load()}"
        )
    table = Table(title=title, caption="live / simulated")
    head, *rest = rows_of(rounds)
    for cell in head:
        table.add_column(cell)
    for row in rest:
        table.add_row(*row)
    console.print(table)
    quietest = min(rounds, key=lambda one: one.busy_elsewhere)
    console.print(f"quietest round: median TTFT error {quietest.ttft_error:.1%}, "
                  f"TBT {quietest.tbt_error:.1%} (wanted: under {WANTED_ERROR:.0%})")  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(msgspec.to_builtins(rounds), indent=1) + "\n")
    if args.report:
        write_report(args.report, title, rounds)
    return int(max(quietest.ttft_error, quietest.tbt_error) >= WANTED_ERROR)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sim-vs-real", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "k2-tiny")
    parser.add_argument("--trace", help="JSONL to take the first requests of (default: made up)")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rehearsal", type=int, default=30, help="requests before, and after")
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second, on average")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers, a pool each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=3, help="of the trace that is made up")
    parser.add_argument("--json", metavar="OUT")
    parser.add_argument("--report", metavar="OUT.html")
    return parser.parse_args(argv)
