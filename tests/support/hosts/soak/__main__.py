"""The soak: `make soak-hosts`, or `python -m tests.support.hosts.soak --help`."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import mooncake
from benchmarks.support.servers import machine
from tests.support.hosts.hosts import Hosts
from tests.support.hosts.soak.cluster import ROLES, SoakCluster, until
from tests.support.hosts.soak.faults import KINDS, draw
from tests.support.hosts.soak.verdict import (
    Sample,
    Span,
    growth,
    leaks,
    pauses_by_kind,
    problems_of,
)
from tests.support.hosts.soak.watch import Watch
from tests.support.serve.server_process import nano_checkpoint

ROOT = Path(__file__).resolve().parents[4]
START_S = 300.0
WHOLE_S = 300.0
"""After a fault the cluster must be whole again by then."""
MOST = 256
"""Answers that may be still to come; more are a problem."""
LAST_S = 600.0
"""The last answers must have come by then."""
IDLE_S = 90.0
SILENCE_S = 60.0
"""A try that hears nothing for so long is given up."""
STEP_S, LOOK_S = 0.5, 5.0
LENGTHS = (8, 24, 64)
LEAVES = 0.1
"""The share of those who get a stream that hangs up in the middle of it."""
PROMPTS = [
    f"{beginning} " + "The quick brown fox jumps over the lazy dog. " * count
    for beginning in ("Tell me more.", "Once upon a time.")
    for count in (1, 4, 8, 16, 24, 32, 40)
]


class Soak:
    """One run. Owns its hosts while it lasts."""

    def __init__(self, seed: int, minutes: float, rate: float, folder: Path) -> None:
        self._seed, self._seconds, self._rate, self._folder = seed, 60.0 * minutes, rate, folder
        self._spans: list[Span] = []
        self._problems: list[str] = []
        self._looked_s = float("-inf")
        self._loads: list[float] = []

    def run(self) -> dict[str, Any]:
        """Do it all; return the figures."""
        shared = self._folder / "shared"
        model = nano_checkpoint(shared)
        self._right = right_answers(model)
        with Hosts(len(ROLES) + 1, self._folder / "hosts", shared) as hosts:
            self._cluster = SoakCluster(hosts, model, self._folder)
            self._watch = Watch(list(self._cluster.machines.values()))
            plan = {
                "prompts": PROMPTS, "lengths": LENGTHS, "seed": self._seed, "rate": self._rate,
                "silence_s": SILENCE_S, "most": MOST, "leaves": LEAVES,
            }  # fmt: skip
            self._cluster.start_asker(plan)
            began_s = time.time()
            if not self._until_whole(began_s, START_S):
                raise RuntimeError("the cluster does not start; its logs are in the folder")
            self._cluster.asker.begin()
            began_s = time.time()
            try:
                self._have_faults(began_s + self._seconds)
                self._end()
            except Exception as error:  # what was found until then is told all the same
                traceback.print_exc()
                self._problems.append(f"the soak itself failed: {error!r}")
            seconds = time.time() - began_s
        return self._figures(seconds)

    def _step(self) -> None:
        time.sleep(STEP_S)
        self._cluster.asker.read()
        if time.monotonic() > self._looked_s + LOOK_S:
            self._looked_s = time.monotonic()
            self._watch.look()
            self._loads.append(os.getloadavg()[0])

    def _rest(self, seconds: float) -> None:
        until(lambda: False, seconds, self._step)

    def _until_whole(self, since_s: float, limit_s: float) -> bool:
        return until(lambda: self._cluster.is_whole(since_s), limit_s, self._step)

    def _have_faults(self, end_s: float) -> None:
        chance = random.Random(f"faults {self._seed}")
        while time.time() < end_s:
            fault = draw(chance, ROLES)
            print(f"{end_s - time.time():6.0f} s left: {fault}", file=sys.stderr, flush=True)
            from_s = time.time()
            end = self._cluster.begin(fault)
            self._rest(fault.seconds)
            end()
            to_s = time.time()
            whole = self._until_whole(to_s, WHOLE_S)
            if not whole:
                self._problems.append(f"not whole {WHOLE_S:.0f} s after {fault}")
            self._spans.append(Span(fault, from_s, to_s, time.time() if whole else None))
            if ended := self._cluster.ended():
                self._problems += ended
                return
            self._rest(chance.uniform(0.0, 5.0))

    def _end(self) -> None:
        """Let all answers come, and look at what is left."""
        asker = self._cluster.asker
        asker.end()
        self._rest(2 * LOOK_S)
        if not until(lambda: asker.status()["running"] == 0, LAST_S, self._step):
            self._problems.append(f"{asker.status()['running']} requests have not ended")
        if not until(asker.is_idle, IDLE_S, self._step):
            self._problems.append(f"something is held for requests that ended: {asker.status()}")
        asker.end()
        asker.wait(LAST_S)
        self._watch.look()
        self._problems += self._cluster.stop()

    def _figures(self, seconds: float) -> dict[str, Any]:
        answers = self._cluster.asker.answers()
        for answer in answers:
            for one in answer["tries"]:
                one["host"] = self._cluster.name_of(one["host"])
            right = self._right[answer["prompt"]][: answer["length"]]
            self._problems += problems_of(answer, right, self._spans)
        if not_sent := sum("not_sent" in each for each in self._cluster.asker.seen):
            self._problems.append(f"{not_sent} requests were not sent: too many ran")
        for (name, boot), samples in self._watch.seen.items():
            if found := leaks(name, samples):
                kinds = self._watch.kinds[name, boot]
                self._problems += [f"{each}; descriptors: {kinds}" for each in found]
        asked = {each["asked"] for each in self._cluster.asker.seen if "asked" in each}
        lost = asked - {answer["answer"] for answer in answers}
        self._problems += [f"request {each} never ended" for each in sorted(lost)]
        pauses = [(at_s, length) for answer in answers for at_s, length in answer["pauses"]]
        return {
            "seed": self._seed,
            "minutes": round(seconds / 60.0, 1),
            "requests_a_second": self._rate,
            "machine": machine(),
            "load": [f"{of(self._loads):.1f}" for of in (min, statistics.median, max)],
            "requests": len(answers),
            "streamed": sum(answer["stream"] for answer in answers),
            "tokens": sum(len(each["tries"][-1].get("ids", [])) for each in answers),
            "lost": len(lost),
            "tries": Counter(one["how"] for answer in answers for one in answer["tries"]),
            "faults": pauses_by_kind(self._spans, pauses),
            "growth": held_by_role(self._watch.seen),
            "problems": self._problems,
        }


def right_answers(model: Path) -> list[list[int]]:
    """Return what one process answers to each prompt."""
    with mooncake.LLM(str(model), dtype="float32", kv_cache_memory_bytes="32MiB") as llm:
        sampled = llm.generate(
            PROMPTS, max_tokens=max(LENGTHS), temperature=0, ignore_eos=True
        )  # fmt: skip
    return [list(each.outputs[0].token_ids) for each in sampled]


def held_by_role(seen: dict[tuple[str, str], list[Sample]]) -> dict[str, dict[str, Any]]:
    """Return for each role by how much the process grew that grew most."""
    found: dict[str, list[tuple[int, int]]] = {}
    for (name, _), samples in seen.items():
        if (grown := growth(samples)) is not None:
            found.setdefault(name.partition(" ")[0], []).append(grown)
    return {
        role: {
            "processes": len(all_of),
            "memory_mib": round(max(size for size, _ in all_of) / 2**20, 1),
            "descriptors": max(count for _, count in all_of),
        }
        for role, all_of in sorted(found.items())
    }


def report(figures: dict[str, Any]) -> str:
    """Return the figures as tables of Markdown."""
    tries = ", ".join(f"{how} {number}" for how, number in sorted(figures["tries"].items()))
    lines = [
        f"{figures['requests']} requests in {figures['minutes']} minutes, seed {figures['seed']}, "
        f"{figures['streamed']} of them streamed; tries: {tries}. {figures['tokens']} tokens, "
        f"{figures['lost']} requests lost, {len(figures['problems'])} problems. "
        f"{figures['machine']}, load (least, median, most) {', '.join(figures['load'])}.",
        "",
        "| fault | times | longest pause of a stream, s | whole again after, s (median, longest) |",
        "|---|---|---|---|",
    ]
    for kind in KINDS:
        if row := figures["faults"].get(kind):
            whole = [row["whole_median_s"], row["whole_longest_s"]]
            shown = ", ".join("never" if each is None else f"{each:.0f}" for each in whole)
            lines.append(f"| {kind} | {row['times']} | {row['longest_pause_s']:.1f} | {shown} |")
    lines += ["", "| processes | lived for minutes | most memory more, MiB | descriptors |"]
    lines += ["|---|---|---|---|"]
    for role, row in figures["growth"].items():
        lines.append(
            f"| {role} | {row['processes']} | {row['memory_mib']} | {row['descriptors']} |"
        )
    lines += ["", *(f"PROBLEM {each}" for each in figures["problems"])]
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    """Run the soak that was asked for; return 1 when something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.hosts.soak",
        description="A cluster on hosts made of namespaces, under open-loop load and random "
        "faults. Needs root.",
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--seed", type=int, default=0, help="another one draws other faults (0)")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second (0.5)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "soak-hosts",
        help="where logs and figures are written; what is there is removed",
    )  # fmt: skip
    wanted = parser.parse_args(words)
    shutil.rmtree(wanted.out, ignore_errors=True)
    wanted.out.mkdir(parents=True)
    figures = Soak(wanted.seed, wanted.minutes, wanted.rate, wanted.out).run()
    (wanted.out / "figures.json").write_text(json.dumps(figures, indent=2))
    print(report(figures))
    return int(bool(figures["problems"]))


if __name__ == "__main__":
    sys.exit(main())
