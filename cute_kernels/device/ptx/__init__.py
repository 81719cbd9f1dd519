"""Registers, barriers and instructions for which the DSL has no name."""
