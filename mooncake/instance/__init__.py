"""Holds what prefill and decode workers share: an engine, its membership in the cluster, and its
fetches, pushes and puts of blocks.
"""
