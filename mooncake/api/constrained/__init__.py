"""Constrained answers: turns JSON schemas, patterns and tools into grammars."""
