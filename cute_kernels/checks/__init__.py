"""Checks that operations share: of descriptors' fields, of real tensors, and of memory that two tensors share."""
