"""Text to tokens and back: tokenizer, chat template, parsing of answers."""
