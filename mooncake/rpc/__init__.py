"""Control messages between processes: the channel port, its two implementations, and membership."""
