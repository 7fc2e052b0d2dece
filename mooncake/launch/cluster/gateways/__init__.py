"""Gateway processes: beside workers, without any, or over engines of others."""
