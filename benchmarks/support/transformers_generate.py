"""transformers' `generate` on the same checkpoint: one batch, prefill and decode timed apart.

A process of its own, started by `serve`:

    python -m benchmarks.support.transformers_generate MODEL BATCH LEN
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

DECODE_STEPS = 8
"""Steps that are timed; a whole answer would take minutes and all steps cost about the same."""


def run(model: str, batch: int, input_len: int) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    vocab = network.config.vocab_size
    times = {}
    for new_tokens in (1, 1, 1 + DECODE_STEPS):  # the first call warms up
        ids = torch.randint(1, vocab, (batch, input_len))
        start_s = time.perf_counter()
        with torch.inference_mode():
            network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
        times[new_tokens] = time.perf_counter() - start_s
    step_s = (times[1 + DECODE_STEPS] - times[1]) / DECODE_STEPS
    print(json.dumps({"first_s": times[1], "step_s": step_s}))


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
