"""`mooncake simulate --replay BUNDLE`: the choices of one call, made again by what places."""

from __future__ import annotations

from rich.console import Console

from mooncake.scheduler.placement.choice_replay import BundledPlacement, replay
from mooncake.sim.files import as_json, read_bundle, write
from mooncake.telemetry.terminal import show_rows

NOBODY = "nobody: no worker is large enough"


def replay_bundle(file: str, json: str | None) -> int:
    """Print who was chosen for each placement and who is chosen now; 1 where these differ."""
    bundle = read_bundle(file)
    rows = [["request", "attempt", "chosen then", "chosen now"]]
    replayed = []
    same = True
    for entry in bundle.placements:
        then, now = _then(entry.placement), _now(entry.placement)
        same = same and then == now
        rows.append([entry.request_id, str(entry.attempt), then, now])
        replayed.append(
            {"request_id": entry.request_id, "attempt": entry.attempt, "then": then, "now": now}
        )
    write(json, as_json({"receipt": bundle.receipt, "same": same, "placements": replayed}))
    title = f"{bundle.receipt}: " + ("the same workers" if same else "OTHER WORKERS are chosen now")
    show_rows(title, rows, Console())
    return 0 if same else 1


def _then(placement: BundledPlacement) -> str:
    return _pair(placement.prefill, placement.decode)


def _now(placement: BundledPlacement) -> str:
    chosen = replay(placement)
    return NOBODY if chosen is None else _pair(*chosen)


def _pair(prefill: str | None, decode: str) -> str:
    return f"{decode} alone" if prefill is None else f"{prefill} -> {decode}"
