"""The processes of `mooncake serve`, of this machine or placed by Ray."""
