"""Folders of Hugging Face: configurations, weights, tokenizers."""
