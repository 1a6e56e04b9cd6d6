"""Benches that exchange messages: between processes, on the test bed, in a launch, or virtually.

`frame` starts the ranks and prints; each bench is a module with its cases and its row.
"""
