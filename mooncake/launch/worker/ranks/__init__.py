"""The other ranks of an instance: their processes, here and elsewhere, their pages and links."""
