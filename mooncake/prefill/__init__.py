"""The prefill role: computes the KV of prompts, pushes it, and samples the first token."""
