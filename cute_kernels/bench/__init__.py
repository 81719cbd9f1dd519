"""What this machine does a layer of a model: decode attention, the append of new tokens, and a prompt."""
