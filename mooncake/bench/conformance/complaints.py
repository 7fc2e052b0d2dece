"""What users of disaggregated servers complain of in public, and Mooncake's tests for it. Pure."""

from __future__ import annotations

import msgspec


class Complaint(msgspec.Struct, frozen=True, kw_only=True):
    """One complaint, and where it was made."""

    words: str
    issues: tuple[str, ...]
    """Public issues, as repository#number."""
    tests: tuple[str, ...]
    """The tests of this repository that show that Mooncake does not have the problem."""


COMPLAINTS = {
    "kv-leak": Complaint(
        words="KV leaks when requests are aborted",
        issues=("vllm#46283", "vllm#41269", "sglang#36926"),
        tests=(
            "tests/conformance/test_aborts.py",
            "tests/integration/serve/test_real_processes.py",
            "tests/sim/test_lost_words.py",
        ),
    ),
    "late-writer": Complaint(
        words="a late writer overwrites pages that are used again",
        issues=("sglang#24527", "vllm#48633"),
        tests=(
            "tests/integration/transfer/test_fences.py",
            "tests/integration/transfer/test_rdma_fences.py",
            "tests/integration/serve/test_stopped_writer.py",
            "tests/integration/serve/test_conformance.py",
            "tests/sim/test_cut_off_workers.py",
        ),
    ),
    "stale-handle": Complaint(
        words="a stale or forged handle gives garbage, or another prompt's answer, with status 200",
        issues=("vllm#52234",),
        tests=(
            "tests/conformance/test_handles.py",
            "tests/integration/pool/test_roles.py",
            "tests/integration/transfer/test_processes.py",
        ),
    ),
    "cache-key": Complaint(
        words="the cache's key ignores layout, dtype or weights",
        issues=("LMCache#4463", "dynamo#14416", "Mooncake#4153", "sglang#26792"),
        tests=(
            "tests/conformance/test_cold_and_warm.py",
            "tests/unit/model/checkpoint/test_weights.py",
            "tests/integration/serve/test_warm_server.py",
        ),
    ),
    "dead-thread": Complaint(
        words="requests hang without an error because a background thread died",
        issues=("sglang#34343", "vllm#50719"),
        tests=("tests/conformance/test_dead_threads.py", "tests/sim/test_hung_steps.py"),
    ),
    "blacklist": Complaint(
        words="one passing failure blacklists a pair of workers for ever",
        issues=("sglang#13054",),
        tests=(
            "tests/integration/transfer/test_refusals.py",
            "tests/integration/transfer/test_rdma_rules.py",
        ),
    ),
    "replaced-prefill": Complaint(
        words="a replaced prefill worker crashes decode, or leaves its memory there",
        issues=("vllm#49238", "vllm#58063"),
        tests=(
            "tests/conformance/test_replacements.py",
            "tests/conformance/test_registrations.py",
            "tests/integration/serve/test_real_processes.py",
        ),
    ),
    "frozen-ranks": Complaint(
        words="KV growth on one data-parallel rank freezes the others",
        issues=("sglang#30033",),
        tests=(
            "tests/conformance/test_frozen_ranks.py",
            "tests/integration/launch/test_ranks.py",
            "tests/integration/launch/test_expert_peers.py",
            "tests/integration/serve/test_rank_processes.py",
        ),
    ),
    "slower": Complaint(
        words="disaggregated is slower than aggregated for short prompts",
        issues=("dynamo#4425", "sglang#6411", "sglang#34815"),
        tests=("tests/conformance/test_short_prompts.py",),
    ),
    "slow-transport": Complaint(
        words="a slow transport is chosen without a word",
        issues=("vllm#52607", "llm-d#2370"),
        tests=("tests/unit/launch/host/test_link_metrics.py",),
    ),
    "gid-choice": Complaint(
        words="a NIC or GID is chosen that cannot reach the peer",
        issues=("Mooncake#946", "Mooncake#1593", "sglang#30737"),
        tests=("tests/unit/transfer/test_topology.py", "tests/rdma/test_nics.py"),
    ),
    "registration": Complaint(
        words="memory registration takes minutes and says nothing",
        issues=("Mooncake#848",),
        tests=("tests/conformance/test_registrations.py",),
    ),
    "shapes": Complaint(
        words="unequal shapes give silent garbage, or hang",
        issues=("vllm-ascend#15900", "llm-d#2433"),
        tests=(
            "tests/integration/cluster/test_rank_memories.py",
            "tests/integration/cluster/test_layouts.py",
        ),
    ),
    "router": Complaint(
        words="the router starves decoders, or knows nothing after a restart",
        issues=("dynamo#7836", "dynamo#4904", "dynamo#10580"),
        tests=("tests/sim/test_gateways.py", "tests/integration/serve/test_gateways.py"),
    ),
    "rollout": Complaint(
        words="a rollout cuts streams",
        issues=("aibrix#2413", "dynamo#11173"),
        tests=(
            "tests/integration/serve/test_rolling_restart.py",
            "tests/integration/serve/test_conformance.py",
            "tests/sim/test_leaving.py",
        ),
    ),
    "hit-rate": Complaint(
        words="nothing tells the hit rate, or why a block missed",
        issues=("Mooncake#972", "Mooncake#1160", "Mooncake#3331"),
        tests=("tests/unit/instance/test_fetch_counters.py",),
    ),
}  # fmt: skip
"""The id of each complaint -> the complaint, in the order in which they are shown."""

CHECKS = {
    "aborts": "kv-leak",
    "kill-prefill": "kv-leak",
    "kill-decode": "kv-leak",
    "stop-prefill": "late-writer",
    "handles": "stale-handle",
    "cold-warm": "cache-key",
    "one-end": "dead-thread",
    "refusals": "dead-thread",
    "replace-prefill": "replaced-prefill",
    "short-prompts": "slower",
    "transport": "slow-transport",
    "same-answers": "shapes",
    "rollout": "rollout",
    "hits": "hit-rate",
}
"""The id of each check that `suite` can run on any server -> its complaint, in the order of the
checks.
"""
