"""An instance of several ranks: one log of steps, one end, and KV in several memories."""
