"""Checkpoints that are made: presets, other formats, encrypted ones."""
