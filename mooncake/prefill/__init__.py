"""The prefill role: computes the KV of prompts, pushes it, and samples the first token."""

from mooncake.prefill.worker import PrefillWorker

__all__ = ["PrefillWorker"]
