"""Grammars that constrain tokens."""
