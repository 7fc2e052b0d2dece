"""The pages of one instance: who holds them, and how a block is found again."""
