"""What FlashInfer's own tests need in addition to cute_kernels' classes."""
