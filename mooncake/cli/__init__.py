"""The `mooncake` command: one thin file a command."""
