"""`megatron-sparse bench parameters`."""
