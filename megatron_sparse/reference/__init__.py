"""Slow oracles, one for each op: written to be read. Imported by tests and benches only."""

from megatron_sparse.wire import pad16


def padded(section: bytes) -> bytes:
    """A section of a record, with zeros up to where the next one begins."""
    return section.ljust(pad16(len(section)), b"\0")
