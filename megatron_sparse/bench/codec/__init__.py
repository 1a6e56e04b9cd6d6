"""The benches of codecs: one process, each operation beside a copy of its bytes and beside peers.

`frame` has what they share; `codecs` and `parameters` are commands.
"""
