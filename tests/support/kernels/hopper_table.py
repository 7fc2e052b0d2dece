"""What the compiler makes of each kernel for an H200: kept in a file, shown in kernels/README.md.

`python -m tests.support.kernels.hopper_launches --write` writes both anew. "before" in the file is
what the named commit made of a kernel, for the kernels that have changed since.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
KEPT = ROOT / "benchmarks/gpu/sm90.json"
README = ROOT / "kernels/README.md"
_HEAD = "| launch | kernel | registers | spilled bytes | shared memory | instructions of the loop |"


_TOOK_THE_PLACE_OF = {
    "gate_up_ranges_kernel": "gate_up_kernel",
    "gate_up_fp8_kernel": "gate_up_kernel",
    "down_fp8_kernel": "down_kernel",
    "attend_warpgroups": "_attend",
}


def kept() -> dict[str, Any]:
    """Return the file's content: triton, before (commit, kernels), kernels."""
    content: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    return content


def table(content: dict[str, Any]) -> list[str]:
    """Return the lines of the Markdown table of what changed, before -> now."""
    before = {(row["launch"], row["kernel"]): row for row in content["before"]["kernels"]}
    lines = [_HEAD, "|---|---|---|---|---|---|"]
    for now in content["kernels"]:
        kernel = _TOOK_THE_PLACE_OF.get(now["kernel"], now["kernel"])
        old = before.get((now["launch"].replace(", warpgroups", ""), kernel))
        if old is None:
            continue
        columns = ("registers", "stack_bytes", "shared_bytes", "loop")
        numbers = " | ".join(
            f"{now[name]:,}" if old[name] == now[name] else f"{old[name]:,} -> {now[name]:,}"
            for name in columns
        )
        lines.append(f"| {now['launch']} | `{now['kernel']}` | {numbers} |")
    return lines


def write(kernels: Sequence[dict[str, Any]], triton: str) -> None:
    """Keep `kernels` and replace the table in the README."""
    content = {"triton": triton, "before": kept()["before"], "kernels": kernels}
    KEPT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    lines = README.read_text(encoding="utf-8").splitlines()
    first = lines.index(_HEAD)
    last = next(n for n in range(first, len(lines)) if not lines[n].startswith("|"))
    README.write_text("\n".join([*lines[:first], *table(content), *lines[last:]]) + "\n")
