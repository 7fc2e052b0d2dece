"""Wires the other packages together: settings, processes, ranks. The modules are imported
directly.
"""
