"""`megatron-sparse bench cost-models`."""
