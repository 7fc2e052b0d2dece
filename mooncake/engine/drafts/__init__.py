"""Drafts of the next tokens: where they come from, and which are worth their time."""
