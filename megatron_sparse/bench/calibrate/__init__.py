"""`megatron-sparse calibrate`: measures a cluster on ranks that it starts, prints and saves it."""
