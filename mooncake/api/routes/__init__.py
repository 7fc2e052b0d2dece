"""The HTTP routes, one module for each API, and the renderers of their replies."""
