"""One call's generation: its parameters, its sequences, its logprobs, beam search."""
