"""The tiers of one node: blocks in DRAM, on SSD and in a bucket, and their moves between these."""
