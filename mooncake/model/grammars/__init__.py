"""Grammars that tokens are held to."""
