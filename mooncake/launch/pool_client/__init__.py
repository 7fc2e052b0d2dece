"""Blocking calls on a pool, for programs and for the commands of `mooncake pool`."""
