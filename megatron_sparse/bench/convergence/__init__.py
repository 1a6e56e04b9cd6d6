"""`megatron-sparse bench convergence`."""
