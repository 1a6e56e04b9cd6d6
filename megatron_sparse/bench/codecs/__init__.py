"""`megatron-sparse bench codecs`."""
