"""Benchmarks of the row-sparse all-reduce."""
