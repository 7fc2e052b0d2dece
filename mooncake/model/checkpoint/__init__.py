"""Checkpoints: reading, quantized formats, conversion, presets."""
