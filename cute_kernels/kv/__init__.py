"""What a KV cache is: page tables, scales, how values are quantised and rotated, and bad metadata."""
