"""Measures links and codecs of a cluster into a file that the planner reads."""
