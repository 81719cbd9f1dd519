"""Checks that operations share: of descriptors' fields, of real tensors, and of memory that two of them share."""
