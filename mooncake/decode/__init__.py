"""The decode role: take a prompt's KV from prefill and generate, or do a whole request."""

from mooncake.decode.worker import DecodeWorker

__all__ = ["DecodeWorker"]
