"""Selects the elements of a gradient to send, and keeps the others in a residual."""
