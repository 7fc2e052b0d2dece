"""Makes checkpoints: presets, other formats, encrypted ones."""
