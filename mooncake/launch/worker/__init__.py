"""Runs workers in a process: the driver, the self-profile, in-process clusters."""
