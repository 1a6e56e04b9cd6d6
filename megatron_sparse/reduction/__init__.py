"""One bucket's way from gradient to sum, and the progress thread that drives it."""
