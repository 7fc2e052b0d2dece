"""Benchmark clients: load on an OpenAI endpoint, or an engine timed in this process."""
