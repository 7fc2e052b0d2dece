"""Generates the answers of one call: its parameters, its sequences, its logprobs, beam search."""
