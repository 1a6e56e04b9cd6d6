"""`megatron-sparse bench stragglers`."""
