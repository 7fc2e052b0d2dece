"""The tiers of one node: blocks in DRAM and on SSD, and their moves between the two."""
