"""One worker in one process: the driver, the self-profile, in-process clusters."""
