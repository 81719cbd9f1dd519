"""Traced device code: one concern a file. Importing it imports the CuTe DSL."""
