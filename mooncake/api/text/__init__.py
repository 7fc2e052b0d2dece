"""Turns text into tokens and back: tokenizer, chat template, parsing of answers."""
