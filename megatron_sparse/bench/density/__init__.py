"""`megatron-sparse bench density`."""
