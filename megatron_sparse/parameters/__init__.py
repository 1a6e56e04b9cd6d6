"""The all-gather of updated parameters under a sharded optimizer, without losing a bit.

Every rank still holds the parameters of the last gather. So the owner of a shard sends only how far
each number has moved (`formats.moves`), and every rank adds that to what it holds.
"""
