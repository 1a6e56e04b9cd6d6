"""Characteristics of gradients: profiles, their sampling, and recordings."""
