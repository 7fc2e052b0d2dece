"""Block events in vLLM's form: ours for routers outside, and those of other engines."""
