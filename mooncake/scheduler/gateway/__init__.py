"""The gateway machine: membership of workers, other gateways, pool questions, role changes."""
