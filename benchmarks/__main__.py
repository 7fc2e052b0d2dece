"""`python -m benchmarks [NAME] [FLAGS]`: a published number; with no name, serving."""

from __future__ import annotations

import signal
import sys

from benchmarks import (
    accuracy,
    autoscale,
    balance,
    constrained,
    engine_routing,
    engine_routing_simulated,
    experts,
    frontend,
    goodput,
    k2vv,
    kv_index,
    kv_ssd,
    lent_weights,
    lent_weights_simulated,
    lm_eval,
    long_prompts,
    next_turns,
    optimizers,
    overhead,
    paper,
    pauses,
    pipeline,
    placement,
    planned_steps,
    pool_agents,
    pool_questions,
    pool_tiers,
    pool_values,
    predicted_ttft,
    prompts,
    ranks,
    recipes,
    remote_prefix,
    repeats,
    sampling_fields,
    scale,
    serve,
    sim_vs_real,
    speculation,
    startup,
    step,
    tracing,
    transfer,
    vllm_pool,
    weights,
)

BENCHMARKS = {
    "serve": serve.main,
    "remote-prefix": remote_prefix.main,
    "lent-weights": lent_weights.main,
    "lent-weights-simulated": lent_weights_simulated.main,
    "lm-eval": lm_eval.main,
    "next-turns": next_turns.main,
    "long-prompts": long_prompts.main,
    "optimizers": optimizers.main,
    "overhead": overhead.main,
    "frontend": frontend.main,
    "goodput": goodput.main,
    "constrained": constrained.main,
    "engine-routing": engine_routing.main,
    "engine-routing-simulated": engine_routing_simulated.main,
    "experts": experts.main,
    "paper": paper.main,
    "pauses": pauses.main,
    "pipeline": pipeline.main,
    "accuracy": accuracy.main,
    "autoscale": autoscale.main,
    "balance": balance.main,
    "placement": placement.main,
    "planned-steps": planned_steps.main,
    "predicted-ttft": predicted_ttft.main,
    "speculation": speculation.main,
    "transfer": transfer.main,
    "pool-agents": pool_agents.main,
    "pool-tiers": pool_tiers.main,
    "pool-questions": pool_questions.main,
    "pool-values": pool_values.main,
    "vllm-pool": vllm_pool.main,
    "prompts": prompts.main,
    "ranks": ranks.main,
    "recipes": recipes.main,
    "repeats": repeats.main,
    "k2vv": k2vv.main,
    "kv-index": kv_index.main,
    "kv-ssd": kv_ssd.main,
    "sampling-fields": sampling_fields.main,
    "scale": scale.main,
    "sim-vs-real": sim_vs_real.main,
    "weights": weights.main,
    "step": step.main,
    "tracing": tracing.main,
    "startup": startup.main,
}


def main(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        if argv[0] not in BENCHMARKS:
            print(f"{argv[0]!r} is none of {', '.join(BENCHMARKS)}", file=sys.stderr)
            return 2
        return BENCHMARKS[argv[0]](argv[1:])
    return serve.main(argv)


if __name__ == "__main__":
    # SIGTERM ends a benchmark as Ctrl-C does, so that the servers that it has started end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
