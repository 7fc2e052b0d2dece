"""Constrained answers: from JSON schemas, patterns and tools to grammars."""
