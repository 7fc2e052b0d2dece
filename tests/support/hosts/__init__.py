"""Hosts made of namespaces: machines of their own on a network that only they can reach."""
