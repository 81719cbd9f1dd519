"""FlashInfer's interface over the package's plans, and what its own tests need beside it."""
