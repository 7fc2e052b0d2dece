"""The decode role: receives or computes the KV of prompts and generates their tokens."""

from mooncake.decode.worker import DecodeWorker

__all__ = ["DecodeWorker"]
