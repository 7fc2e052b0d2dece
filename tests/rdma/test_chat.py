"""A conversation answered by prefill and decode engines whose KV moves by RDMA and nothing else."""

from __future__ import annotations

from pathlib import Path

from mooncake.api import load_served_model
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.rdma.test_nics import num_packets
from tests.support.serve.model_cluster import model_cluster, request
from tests.support.transfer.driving import NEEDS_RDMA

pytestmark = NEEDS_RDMA
MAX_TOKENS = 12


def test_a_chat_completion_over_rdma(tmp_path: Path) -> None:
    """Same tokens as over plain copies; the next turn finds its prefix in the pool, by RDMA."""
    model = init_checkpoint("k2-nano", seed=5, out=tmp_path / "nano", dtype="float32")
    served = load_served_model(model)
    said = [{"role": "user", "content": "What travels by RDMA, and who copies it? " * 8}]
    prompt = served.tokenizer.encode(served.template.render(said), allow_special=True)
    answers = {}
    before = num_packets("rxe0") + num_packets("rxe1")
    for protocol in ("inproc", "rdma"):
        with model_cluster(model, 1, 1, protocols=[protocol]) as cluster:
            tokens, final = cluster.generate(request("turn-1", prompt, MAX_TOKENS))
            again, _ = cluster.generate(request("turn-2", [*prompt, *tokens, 5, 6], MAX_TOKENS))
            answers[protocol] = (tokens, again, final.reason)
    assert answers["rdma"] == answers["inproc"]
    num_moved = num_packets("rxe0") + num_packets("rxe1") - before
    assert num_moved > 0
