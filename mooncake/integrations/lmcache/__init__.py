"""A remote storage plugin for LMCache, whose chunks lie in a Mooncake pool."""

__all__: list[str] = []
