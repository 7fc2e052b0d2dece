"""Reads and writes blocks of pool nodes; its clients choose the node."""
