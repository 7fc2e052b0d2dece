"""Requests served within limits, by rate, on real servers: `python -m benchmarks goodput`.

The load is open: requests come when they come, however long answers take. Each server starts fresh
for each rate and seed, servers take turns, and each gets the same requests at the same times. A
request is good when it ends whole, its first token comes within `--ttft-s` and the mean of the
slowest tenth of its gaps is within `--tbt-ms`; one that is refused, late or failed is not.

Loads: `conversations` (a published trace, `--trace`: prompts a sixteenth as long, answers an
eighth, prefixes shared as recorded, Poisson arrivals), `recorded` (the same at the trace's own
times, scaled to the rate), `agents` (sessions of four to eight turns with tools between them, over
one system prompt), `sessions` (the same; each names its session, so that the pool keeps it),
`chats` (short questions that share nothing) and `tenants` (chats of one tenant, interactive and
premium, beside bursts of longer requests of another, interactive and batch; only ours, because each
tenant has a key).

Of two gateways, each gets every other session; the simulator plays servers with one. Early
rejection is what "told" does: compare a server that is told the limits with one that is not.
`--foretell FILE` measures nothing: the simulator plays all loads on our servers.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.serve import KV_BYTES, write_model
from benchmarks.support import vllm_environment
from benchmarks.support.goodput_figures import (
    Limits,
    Outcome,
    Trial,
    by_party,
    next_turns,
    relative,
    summary,
    table,
)
from benchmarks.support.goodput_twin import compared, plan_of, read_profile, twin
from benchmarks.support.kept_runs import KeptRuns
from benchmarks.support.servers import (
    BUILD,
    MAX_MODEL_LEN,
    ROOT,
    SERVED_NAME,
    Layout,
    Server,
    machine,
    ours,
    running,
    vllm_cpu,
)
from benchmarks.support.sessions import (
    PARTIES,
    Session,
    Turn,
    agents,
    chats,
    conversations,
    keys_file,
    shorter,
    tenants,
)
from mooncake.api.http.client import HttpClient
from mooncake.api.http.event_loop import run_in_loop
from mooncake.base import CostSample
from mooncake.bench.endpoint import Output, Target, ask
from mooncake.bench.samples import PromptSource, Sample
from mooncake.sim.files import read_trace
from mooncake.sim.results.plots import Line, lines_plot
from mooncake.sim.results.report import comparison_page
from mooncake.telemetry.stats import slow_gap_mean

LOADS = ("conversations", "recorded", "agents", "sessions", "chats", "tenants")
KEYS = BUILD / "goodput-keys.yaml"
SHARES = (0.9, 0.99)
VLLM_CHUNKS = (256, 512, 2048)
"""Tokens of a step that vllm-cpu is tried with; its best counts."""
PATIENCE = 4
"""A client goes away when an answer takes so many times what limits allow in all: it is late."""
NUM_ALONE, ALONE_TOKENS, ALONE_ANSWER = 3, 512, 32
ALONE_EVERY_S = 60.0
"""The simulator sends such requests so far apart that each meets an idle server."""
REFUSALS = ("429", "503")
TARGET = Target(
    backend="openai",
    endpoint="/v1/completions",
    model=SERVED_NAME,
    headers={"Content-Type": "application/json"},
    fields={"ignore_eos": True, "temperature": 0, "return_token_ids": True},
)


def layouts(model: Path, limits: Limits) -> dict[str, Layout]:
    """Return the servers that can be compared; vllm-cpu where its environment is there."""
    memory = ("--kv-cache-memory-bytes", KV_BYTES)
    pool = (*memory, "--kvstore-dram-bytes", KV_BYTES)
    told = ("--slo-ttft-s", f"{limits.ttft_s:g}", "--slo-tbt-ms", f"{1e3 * limits.tbt_s:g}")
    found = [
        ours("colocated", model, "--colocated", *memory),
        ours("colocated, told", model, "--colocated", *memory, *told),
        ours("1P+1D", model, "--kvstore", "0", *memory),
        ours("1P+1D+1K", model, *pool),
        ours("1P+1D+1K, told", model, *pool, *told),
    ]
    found.append(
        dataclasses.replace(found[-1], name="1P+1D+1K, told, two gateways", num_gateways=2)
    )
    if (peer := vllm_cpu(model)) is not None:
        for chunk in VLLM_CHUNKS:
            command = (*peer.command, "--max-num-batched-tokens", str(chunk))
            found.append(dataclasses.replace(peer, name=f"vllm-cpu, {chunk}", command=command))
    return {each.name: each for each in found}


def has_twin(layout: Layout) -> bool:
    """Return whether the simulator can play the server: ours, with one gateway."""
    return layout.is_ours and layout.num_gateways == 1


# ---------------------------------------------------------------- one trial


def load_of(args: argparse.Namespace, name: str, rate: float, seed: int) -> list[Session]:
    """Return the sessions of one load: the same for every server."""
    draw = _words(args.model).draw
    if name == "agents":
        return agents(args.requests, rate, draw, seed)
    if name == "sessions":
        found = enumerate(agents(args.requests, rate, draw, seed))
        return [dataclasses.replace(one, name=f"session-{number}") for number, one in found]
    if name == "tenants":
        return tenants(args.requests, rate, draw, seed)
    if name == "chats":
        return chats(args.requests, rate, draw, seed)
    recorded = name == "recorded"
    return conversations(args.lines, args.requests, rate, draw, seed, recorded=recorded)


def _words(model: Path) -> PromptSource:
    return PromptSource(None, json.loads((model / "config.json").read_text())["vocab_size"])


async def play(
    clients: Sequence[HttpClient], sessions: Sequence[Session], limits: Limits
) -> list[Outcome]:
    """Send every session when it is due; return one outcome for each of their requests. Sessions
    go to the clients in turn, each session to one.
    """
    began_s = time.perf_counter()

    async def follow(session: Session, client: HttpClient) -> list[Outcome]:
        await asyncio.sleep(max(0.0, began_s + session.at_s - time.perf_counter()))
        said: list[int] = []
        ended: list[Outcome] = []
        for turn in session.turns:
            await asyncio.sleep(turn.pause_s)
            num_said = len(said)
            said = [*said, *turn.fresh]
            patience_s = PATIENCE * (limits.ttft_s + turn.output_len * limits.tbt_s)
            try:
                sent = _sent(client, said, turn.output_len, session.party, session.name)
                output = await asyncio.wait_for(sent, patience_s)
            except TimeoutError:
                break
            outcome = _outcome(output, session.party)
            ended.append(msgspec.structs.replace(outcome, num_said=num_said))
            if not output.success:
                break
            said += output.token_ids
        late = Outcome(end="late", party=session.party)
        return ended + [late] * (len(session.turns) - len(ended))

    followed = await asyncio.gather(*map(follow, sessions, itertools.cycle(clients)))
    return [each for ended in followed for each in ended]


async def _sent(
    client: HttpClient, prompt: list[int], output_len: int, party: str = "", session: str = ""
) -> Output:
    sample = Sample(prompt=prompt, num_prompt_tokens=len(prompt), num_output_tokens=output_len)
    return await ask(client, _target(party, session), sample, 0)


def _target(name: str, session: str) -> Target:
    """Return the endpoint as a party uses it in a session; without one, as the first party."""
    party = PARTIES[name or next(iter(PARTIES))]
    headers = TARGET.headers | {"Authorization": f"Bearer {party.key}"}
    fields = TARGET.fields | ({"priority": party.priority} if name else {})
    fields |= {"session_id": session} if session else {}
    return dataclasses.replace(TARGET, headers=headers, fields=fields)


def _outcome(output: Output, party: str) -> Outcome:
    if not output.success:
        end: Literal["refused", "failed"] = (
            "refused" if output.error.startswith(REFUSALS) else "failed"
        )
        return Outcome(end=end, party=party)
    tbt_s = slow_gap_mean(output.itls_s)
    return Outcome(
        end="whole", ttft_s=output.ttft_s, tbt_s=tbt_s, party=party,
        num_cached=output.num_cached_tokens,
    )  # fmt: skip


def _alone_turns(words: PromptSource, seed: int) -> list[Turn]:
    """Return the requests for an idle server: the first wakes it and does not count."""
    source = random.Random(f"alone/{seed}")
    return [
        Turn(fresh=words.draw(source, ALONE_TOKENS), output_len=ALONE_ANSWER)
        for _ in range(1 + NUM_ALONE)
    ]


async def _alone(client: HttpClient, words: PromptSource, seed: int) -> list[Output]:
    """Send requests one after the other."""
    outputs = [
        await _sent(client, turn.fresh, turn.output_len) for turn in _alone_turns(words, seed)
    ]
    if failed := [output.error for output in outputs if not output.success]:
        raise RuntimeError(f"a request to the idle server failed: {failed[0]}")
    return outputs[1:]


async def _trial(
    server: Server, model: Path, sessions: Sequence[Session], limits: Limits, seed: int
) -> tuple[list[Output], list[Outcome]]:
    clients = [HttpClient(url) for url in server.urls]
    try:
        alone = await _alone(clients[0], _words(model), seed)
        return alone, await play(clients, sessions, limits)
    finally:
        for client in clients:
            client.close()


def measure(args: argparse.Namespace, layout: Layout, load: str, rate: float, seed: int) -> Trial:
    """Start a server, play a load on it, end it."""
    limits = _limits(args)
    sessions = load_of(args, load, rate, seed)
    if load == "tenants":
        KEYS.parent.mkdir(parents=True, exist_ok=True)
        KEYS.write_text(keys_file(), encoding="utf-8")
        layout = dataclasses.replace(
            layout, command=(*layout.command, "--api-keys-file", str(KEYS))
        )
    with running(layout) as server:
        alone, outcomes = run_in_loop(_trial(server, args.model, sessions, limits, seed))
    return Trial(
        load=load,
        server=layout.name,
        rate=rate,
        seed=seed,
        outcomes=outcomes,
        idle_ttft_s=statistics.median(each.ttft_s for each in alone),
        idle_tbt_s=statistics.median(slow_gap_mean(each.itls_s) for each in alone),
        load_average=os.getloadavg()[0],
    )


def simulated(args: argparse.Namespace, trials: Sequence[Trial]) -> list[str]:
    """Return a table of what was measured and what the simulator foretells, for our servers."""
    limits = _limits(args)
    known, samples = layouts(args.model, limits), read_profile(args.twin)
    ours = [trial for trial in trials if (one := known.get(trial.server)) and has_twin(one)]
    twins = []
    for trial in ours:
        once, again = (_twin(args, known[trial.server], samples, trial, turn) for turn in (0, 1))
        twins.append((trial, once, again))
    return compared(twins, limits)


def foretold(
    args: argparse.Namespace, layout: Layout, measured: Sequence[Trial], load: str, rate: float,
    seed: int,
) -> Trial:  # fmt: skip
    """Return a trial that only the simulator plays. An idle server takes as long as in the trials
    of it that were measured, or as the profile says where there are none.
    """
    own = [trial for trial in measured if trial.server == layout.name]
    trial = Trial(
        load=load,
        server=layout.name,
        rate=rate,
        seed=seed,
        outcomes=[],
        idle_ttft_s=statistics.median(one.idle_ttft_s for one in own) if own else 0.0,
        idle_tbt_s=statistics.median(one.idle_tbt_s for one in own) if own else 0.0,
        load_average=0.0,
    )
    outcomes = _twin(args, layout, read_profile(args.foretell), trial)
    return msgspec.structs.replace(trial, outcomes=outcomes)


def _twin(
    args: argparse.Namespace, layout: Layout, samples: Sequence[CostSample], trial: Trial,
    turn: int = 0,
) -> list[Outcome]:  # fmt: skip
    alone = [
        Session(at_s=ALONE_EVERY_S * place, turns=[turn])
        for place, turn in enumerate(_alone_turns(_words(args.model), trial.seed)[1:])
    ]
    sessions = load_of(args, trial.load, trial.rate, trial.seed)
    return twin(
        plan_of(layout), samples, trial, alone, sessions, _limits(args), PATIENCE, 1000 * turn
    )


# ---------------------------------------------------------------- what comes of it


def report(trials: Sequence[Trial], kinds: Mapping[str, Limits]) -> list[str]:
    """Return all tables in Markdown, for each kind of limits."""
    lines: list[str] = []
    for name, limits in kinds.items():
        head = f"{name}: TTFT {limits.ttft_s:.2f} s, TBT {1e3 * limits.tbt_s:.0f} ms"
        lines += ["", head, "", *table(trials, limits), "", *summary(trials, limits, SHARES)]
        lines += ["", *by_party(trials, limits)]
    return [*lines, "", *next_turns(trials)]


def write_page(path: Path, title: str, trials: Sequence[Trial], limits: Limits) -> None:
    """Write the table and, for each load, the share of good requests by rate as one page."""
    plots = []
    for load in sorted({trial.load for trial in trials}):
        own = [trial for trial in trials if trial.load == load]
        rates = sorted({trial.rate for trial in own})
        lines = [
            Line(name=server, values=[_share(own, server, rate, limits) for rate in rates])
            for server in sorted({trial.server for trial in own})
        ]
        plots.append((load, lines_plot(rates, lines, "requests a second", "share of good")))
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for number, line in enumerate(table(trials, limits))
        if number != 1  # the line below the head
    ]
    page = comparison_page(title, [("By rate", rows, "All seeds together.")], plots)
    path.write_text(page, encoding="utf-8")


def _share(trials: Sequence[Trial], server: str, rate: float, limits: Limits) -> float:
    own = [trial for trial in trials if trial.server == server and trial.rate == rate]
    return statistics.mean(trial.share(limits) for trial in own) if own else 0.0


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    if args.with_vllm:
        vllm_environment.make()
    write_model(args.model)
    limits = _limits(args)
    known = layouts(args.model, limits)
    if unknown := [name for name in args.only or () if name not in known]:
        print(f"no server is called {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    keeping = KeptRuns(args.out, Trial)
    kept = keeping.read()
    trials = [] if args.foretell else list(kept)
    done = {(trial.load, trial.rate, trial.seed, trial.server) for trial in trials}
    title = f"goodput of {args.model.name}, {'simulated' if args.foretell else machine()}"
    print(title)
    seeds = range(args.seed, args.seed + args.seeds)
    turns = itertools.product(seeds, args.loads, args.rates, args.only or known)
    for seed, load, rate, name in turns:
        if (load, rate, seed, name) in done or (load == "tenants" and not known[name].is_ours):
            continue
        if args.foretell:
            if has_twin(known[name]):
                trials.append(foretold(args, known[name], kept, load, rate, seed))
            continue
        trials.append(trial := measure(args, known[name], load, rate, seed))
        keeping.add(trial)
        print(
            f"{load} {rate:g}/s seed {seed} {name}: {trial.share(limits):.0%} good of "
            f"{len(trial.outcomes)}, load average {trial.load_average:.1f}",
            flush=True,
        )
    kinds = {"absolute limits": limits}
    if not args.foretell:
        kinds["10x and 5x of the fastest idle"] = relative(trials, 10, 5)
    print("\n".join(report(trials, kinds)))
    if args.twin:
        print("\n".join(["", "measured, simulated:", "", *simulated(args, trials)]))
    if args.report:
        write_page(args.report, title, trials, limits)
    return 0


def _limits(args: argparse.Namespace) -> Limits:
    return Limits(ttft_s=args.ttft_s, tbt_s=args.tbt_ms / 1e3)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks goodput", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "k2-small")
    parser.add_argument("--trace", type=Path, help="of conversations; as published, JSONL")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=["agents", "chats"])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.15, 0.3, 0.5, 0.7])
    parser.add_argument("--requests", type=int, default=60, help="of each trial (60)")
    parser.add_argument("--only", nargs="+", metavar="SERVER", help="names as the tables show them")
    parser.add_argument("--ttft-s", type=float, default=5.0, help="limit of the first token (5)")
    parser.add_argument("--tbt-ms", type=float, default=150.0, help="limit of the gaps (150)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (3)")
    parser.add_argument("--seed", type=int, default=1, help="the first (1)")
    parser.add_argument("--with-vllm", action="store_true", help=f"make {BUILD.name}/vllm-venv")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep trials here, and go on")
    parser.add_argument("--report", type=Path, metavar="PAGE", help="write tables and plots")
    parser.add_argument("--twin", type=Path, metavar="FILE",
        help="simulate our trials too, on a machine with this profile (mooncake profile --out)",
    )  # fmt: skip
    parser.add_argument("--foretell", type=Path, metavar="FILE",
        help="measure nothing: simulate our servers on a machine with this profile, scaled to the "
        "idle times of the trials in --out if there are any",
    )  # fmt: skip
    args = parser.parse_args(argv)
    args.lines = None
    if {"conversations", "recorded"} & set(args.loads):
        if args.trace is None:
            parser.error("these loads need --trace FILE")
        args.lines = shorter(read_trace(str(args.trace)), int(MAX_MODEL_LEN))
    return args
