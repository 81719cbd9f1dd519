"""Combines a cut row's parts (partial results) through the workspace."""
