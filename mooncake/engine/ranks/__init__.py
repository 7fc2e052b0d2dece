"""An instance of several ranks: one log of steps, a common end, and KV in several memories."""
