"""Secrets of this machine: files of keys and of the cluster secret, and what is signed by them."""
