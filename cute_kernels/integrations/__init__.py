"""Other libraries' interfaces over the plans of this package."""
