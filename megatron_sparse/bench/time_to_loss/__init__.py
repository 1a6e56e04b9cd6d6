"""`megatron-sparse bench time-to-loss`."""
