"""Commands that make checkpoints and compiled code."""
