"""Groups of ranks: what the layers of a model say to each other where several hold one model."""
