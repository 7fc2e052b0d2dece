"""The fuzz campaign: `make fuzz`, or `python -m tests.fuzz --help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import msgspec

from tests.support.fuzz.campaign import Campaign, replay
from tests.support.fuzz.registry import NAMES, target_of

ROOT = Path(__file__).resolve().parents[2]
PROGRESS_S = 10.0


def main(words: list[str] | None = None) -> int:
    """Run the campaigns that were asked for; return 1 when there is a finding."""
    options = _parser().parse_args(words)
    if options.replay is not None:
        return _replay(options.target, options.replay)
    campaigns = [_campaign(name, options) for name in options.target or NAMES]
    print(_table(campaigns), file=sys.stderr)
    if options.json:
        print(json.dumps([_facts(campaign) for campaign in campaigns], indent=2))
    return int(any(campaign.findings for campaign in campaigns))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Mutates inputs of parsers, from recorded seeds."
    )
    parser.add_argument(
        "--target", action="append", choices=NAMES, help="only this one; may be given again"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target (60)")
    parser.add_argument("--inputs", type=int, help="so many for each target, instead of seconds")
    parser.add_argument("--seed", type=int, default=0, help="another one takes other ways (0)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "fuzz", help="where findings are written"
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one input of --target")
    return parser


def _campaign(name: str, options: argparse.Namespace) -> Campaign:
    campaign = Campaign(target_of(name))
    shown_s = [time.monotonic()]

    def progress(now: Campaign) -> None:
        if time.monotonic() - shown_s[0] > PROGRESS_S:
            shown_s[0] = time.monotonic()
            print(_line(now, now.elapsed_s), file=sys.stderr)

    seconds = None if options.inputs is not None else options.seconds
    campaign.run(options.seed, options.out, progress, options.inputs, seconds)
    print(_line(campaign, campaign.elapsed_s), file=sys.stderr)
    for finding in campaign.findings.values():
        shown = os.path.relpath(finding.path)
        print(
            f"FINDING {finding.problem.signature}: {finding.problem.text}\n"
            f"  {len(finding.data)} bytes; once more: "
            f"python -m tests.fuzz --target {name} --replay {shown}",
            file=sys.stderr,
        )
    return campaign


def _line(campaign: Campaign, seconds: float) -> str:
    figures = campaign.figures
    return (
        f"{campaign.target.name:14} {seconds:6.0f} s {figures.num_inputs:9} inputs "
        f"{figures.num_inputs / max(seconds, 0.001):7.0f}/s {figures.num_ways:6} ways "
        f"{figures.num_kept:5} kept, worst {figures.worst_cpu_s:6.3f} s "
        f"{figures.worst_memory / 2**20:6.1f} MiB, {len(campaign.findings)} findings"
    )


def _table(campaigns: list[Campaign]) -> str:
    lines = [_line(campaign, campaign.elapsed_s) for campaign in campaigns]
    return "\n".join(["", "worst: processor time and memory of one input", *lines])


def _facts(campaign: Campaign) -> dict[str, object]:
    findings = [
        {"signature": one.problem.signature, "text": one.problem.text, "path": str(one.path)}
        for one in campaign.findings.values()
    ]
    return {
        "target": campaign.target.name,
        "seconds": round(campaign.elapsed_s, 1),
        **msgspec.to_builtins(campaign.figures),
        "num_repeated": campaign.num_repeated,
        "findings": findings,
    }


def _replay(names: list[str] | None, path: Path) -> int:
    if not names or len(names) != 1:
        print("--replay needs one --target", file=sys.stderr)
        return 2
    problem = replay(target_of(names[0]), path.read_bytes())
    print("nothing is wrong with it" if problem is None else f"{problem.signature}\n{problem.text}")
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main())
