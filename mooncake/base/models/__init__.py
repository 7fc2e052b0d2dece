"""A model as everyone knows it: its sizes, the meaning of its tokens, how ranks share it."""
