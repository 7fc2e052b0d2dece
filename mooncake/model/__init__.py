"""The tensor side: the model, its checkpoints, its devices. torch is imported here only."""
