"""The simulator: the shipped machines on simulated time, wires, disks and step costs."""
