"""Traced device code, one concern per file. Importing it imports the CuTe DSL."""
