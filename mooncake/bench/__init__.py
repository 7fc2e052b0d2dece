"""See the modules; nothing is imported here on purpose."""
