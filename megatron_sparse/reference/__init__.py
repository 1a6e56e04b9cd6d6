"""Slow oracles, one for each op: written to be read. Imported by tests and benches only."""
