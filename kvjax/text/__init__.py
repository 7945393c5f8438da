"""Tokenizers, and the way back from generated tokens to text."""
