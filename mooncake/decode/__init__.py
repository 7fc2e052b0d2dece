"""The decode role: receives or computes the KV of prompts and generates their tokens."""
