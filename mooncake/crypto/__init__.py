"""Keys that operators give, keys that follow from them, and encryption of what lies on disks."""
