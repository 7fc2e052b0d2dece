"""One pool node that runs without engines: its disks, HTTP API, metrics and name on its machine."""
