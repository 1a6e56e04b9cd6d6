"""Benchmarks: no row is timed while its result is wrong."""
