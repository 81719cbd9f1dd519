"""Tokens per second of a transformers model: generate_batch and generate over our attention and others."""
