"""A simulated cluster: clock, network, disks, processes, hardware costs."""
