"""A small Kubernetes on this machine, for the chart's tests."""
