"""The `mooncake` command: one thin file for each command."""
