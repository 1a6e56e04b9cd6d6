"""`megatron-sparse bench planner`."""
