"""What every plan shares: variants and why they serve, workspaces, and checks of real tensors."""
