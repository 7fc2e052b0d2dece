"""Drafts of the next tokens by a layer that reads the model's states."""
