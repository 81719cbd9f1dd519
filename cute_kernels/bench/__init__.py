"""Times a layer of a model on this machine: decode attention, the append of new tokens, and a prompt."""
