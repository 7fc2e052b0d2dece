"""A cluster on hosts made of namespaces under open-loop load and random faults: `make
soak-hosts`.
"""
