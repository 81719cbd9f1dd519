"""How tiles reach shared memory, and who waits for them."""
