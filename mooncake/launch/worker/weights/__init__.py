"""The model of a process: opened, kept through its lives, borrowed and lent."""
