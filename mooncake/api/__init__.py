"""The API server: HTTP and the chat APIs, tokenizer and templates; tokens in, text out."""
