"""What FlashInfer's own tests need beside cute_kernels.integrations.flashinfer."""
