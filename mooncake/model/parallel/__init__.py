"""Groups of ranks: the exchanges between the layers of a model when several ranks hold it."""
