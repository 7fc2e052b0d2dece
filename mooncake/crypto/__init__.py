"""Keys that operators give, keys derived from them, and encryption of data on disks."""
