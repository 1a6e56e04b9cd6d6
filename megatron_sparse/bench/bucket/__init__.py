"""One bucket's way on this device, without a network."""
