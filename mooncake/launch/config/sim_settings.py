"""Settings of `mooncake simulate`, `plan` and `trace`. Defaults come from the fields of
`mooncake.sim` and `mooncake.scheduler` that they set.
"""

from __future__ import annotations

import dataclasses

from mooncake.base import Shape
from mooncake.launch.config.options import (
    OneOf,
    bounds,
    count,
    counts,
    owned,
    positive,
    setting,
    text,
    truth,
)
from mooncake.scheduler.config import POLICIES, SchedulerConfig
from mooncake.sim.simulation import ENGINES, SimulationConfig
from mooncake.sim.trace_cache import POLICY_NAMES

TRACE, CLUSTER, LIMITS, RESULT = "trace", "cluster", "limits", "result"
NAMES = "a name in configs/{}, or a JSON file of the same form"
TRACE_HELP = (
    "JSONL of timestamp (ms), input_length, output_length and hash_ids (a name for each 512 tokens "
    "of the prompt; equal leading ids are a shared prefix)"
)


def _shape(_name: str, value: object) -> str:
    """Read a shape, such as "tp8-dcp8"."""
    return str(Shape.parse(str(value)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """Settings of all commands that replay a trace on a simulated cluster."""

    # fmt: off
    trace: str | None = setting(None, text, TRACE, "FILE", TRACE_HELP)
    trace_format: str = setting("mooncake", OneOf("mooncake"), TRACE, "NAME", "format of the trace")
    speed: float = setting(1.0, positive, TRACE, "X", "replay X times faster")
    limit: int | None = setting(None, count(0), TRACE, "N", "use only the first N requests")
    model: str = setting("llama3-70b", text, CLUSTER, "M", NAMES.format("models"))
    hardware: str = setting("a800x8", text, CLUSTER, "H", NAMES.format("hardware"))
    shape: str | None = setting(None, _shape, CLUSTER, "tpN[-ppN][-dcpN][-dpN-epN]",
        "ranks of each instance; those of a stage (ppN) share a node; tp8 holds all KV on every "
        "rank, tp8-dcp8 divides it; tp8-dp2-ep16 is two instances that share the experts (default: "
        "all GPUs of as few nodes as hold the weights, with KV divided)")
    slo_ttft_s: float = owned(SimulationConfig, "ttft_slo_s", positive, LIMITS, "S",
        "limit on the time to the first token")
    slo_tbt_ms: float = owned(SimulationConfig, "tbt_slo_s", positive, LIMITS, "MS",
        "limit on the mean of the slowest tenth of gaps", per_unit=1000)
    seed: int = owned(SimulationConfig, "seed", count(0), CLUSTER, "N",
        "seed of all random choices")
    json: str | None = setting(None, text, RESULT, "OUT", "write all figures here")
    report: str | None = setting(None, text, RESULT, "OUT.html", "write a page with plots")
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateSettings(Replay):
    # fmt: off
    prefill: int | None = setting(None, count(0), CLUSTER, "N",
        "number of prefill instances (default: 8, or 0 for baselines)")
    decode: int | None = setting(None, count(0), CLUSTER, "N",
        "number of decode instances (default: 8, or 16 for baselines)")
    engine: str = owned(SimulationConfig, "engine", OneOf(*ENGINES), CLUSTER, "NAME",
        "disaggregated, or a baseline of coupled engines, whose number is --decode")
    policy: str = owned(SchedulerConfig, "policy", OneOf(*POLICIES), CLUSTER, "NAME",
        "policy by which a prefill instance is chosen")
    local_caches: bool = setting(False, truth, CLUSTER, "",
        "let no instance fetch from another node's pool")
    reject: bool = setting(False, truth, LIMITS, "",
        "refuse requests that would miss the limits, instead of serving them late")
    plan_by_limits: bool = owned(SimulationConfig, "plan_by_limits", truth, LIMITS, "",
        "let engines plan their steps for the limits, as `mooncake serve` does: prompts that can "
        "be in time go first, and wait for streams or come in short chunks")
    role_switching: bool = owned(SchedulerConfig, "role_switching", truth, CLUSTER, "",
        "let instances change between prefill and decode when the load shifts for long")
    autoscale: str | None = owned(SchedulerConfig, "autoscale", bounds, CLUSTER,
        "prefill=MIN..MAX,decode=MIN..MAX[,total=N][,start=S][,quiet=S]",
        "let instances come and go inside these bounds; --prefill and --decode are those at the "
        "start. start: seconds until a new one serves; quiet: seconds for which fewer must have "
        "been enough before one goes")
    autoscale_by: str = setting("policy", OneOf("policy", "busy"), CLUSTER, "RULE",
        "what --autoscale follows: the policy of the gateways, or how busy the instances are, as a "
        "plain HorizontalPodAutoscaler does")
    pool_tokens: int = owned(SimulationConfig, "pool_tokens", count(0), CLUSTER, "N",
        "tokens in the DRAM pool of each prefill instance")
    link_gbps: float | None = setting(None, positive, CLUSTER, "X",
        "network speed of each instance")
    max_output: int | None = setting(None, count(1), TRACE, "N", "cut recorded outputs to N tokens")
    faults: str | None = setting(None, text, TRACE, "FILE|random",
        "let faults happen and check every machine after each event")
    replay: str | None = setting(None, text, TRACE, "BUNDLE",
        "make the choices of one call again: a file of `mooncake explain --bundle`")
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSettings(Replay):
    # fmt: off
    max_nodes: int = setting(128, count(1), CLUSTER, "N", "largest cluster to try")
    live: bool = setting(False, truth, CLUSTER, "",
        "say how many replicas a running server should have now, and why, instead of simulating; "
        "--json writes the same")
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceFile:
    file: str = setting("", text, TRACE, "FILE", TRACE_HELP, positional=True, required=True)
    json: str | None = setting(None, text, RESULT, "OUT", "write the figures here")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSettings(TraceFile):
    # fmt: off
    policy: str = setting("lru", OneOf(*POLICY_NAMES), TRACE, "NAME", "eviction policy")
    capacity: tuple[int, ...] = setting((1000, 10_000, 30_000, 50_000, 100_000), counts, TRACE,
        "N,...", "sizes of the pool, in blocks of 512 tokens")
    # fmt: on
