"""Devices: captured graphs, copies, pages in device memory."""
