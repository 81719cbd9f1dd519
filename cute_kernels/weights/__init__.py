"""Attention weights: what each query head gives each key, their mean over the heads, and the mass of each page."""
