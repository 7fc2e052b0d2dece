"""The HTTP routes, one module for each API, and what writes their replies."""
