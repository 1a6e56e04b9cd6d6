"""`megatron-sparse bench collectives`."""
