"""Helpers that tests of several operations share: problems in hostile memory, references, tolerances, a fake GPU and clock."""
