"""One step of an engine, as the lead and as its followers run it."""
