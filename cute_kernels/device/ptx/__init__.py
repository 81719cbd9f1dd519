"""Registers, barriers and instructions that the DSL has no name for."""
