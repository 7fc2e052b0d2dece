"""Runs one pool node without engines: its disks, HTTP API, metrics and name on its machine."""
