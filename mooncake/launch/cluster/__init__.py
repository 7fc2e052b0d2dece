"""The processes of `mooncake serve`, under Ray or alone."""
