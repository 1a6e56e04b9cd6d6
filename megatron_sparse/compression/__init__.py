"""Selects what is sent of a gradient, and keeps the rest."""
