"""Generated tasks: what k2-demo is trained on and any endpoint is evaluated with."""
