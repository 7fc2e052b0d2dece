"""Workers on the machines of a Ray cluster: keepers there, and nodes that a file describes."""
