"""The files of a checkpoint directory, plain or encrypted."""
