"""The backward of attention: from the gradient of out to those of q, K, V and the sinks."""
