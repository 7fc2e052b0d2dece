"""The prefill role: compute a prompt's KV, push it away layer by layer, sample the first token."""

from mooncake.prefill.worker import PrefillWorker

__all__ = ["PrefillWorker"]
