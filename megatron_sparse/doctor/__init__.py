"""Checks of this machine, or of a cluster: what is missing and how to get it."""
