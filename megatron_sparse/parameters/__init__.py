"""The compressed all-gather of updated parameters under a sharded optimizer, exact or lossy.

Every rank still holds the parameters of the last gather. So the owner of a shard sends only how far
each number has moved (`formats.moves`), or that rounded, and every rank adds it to what it holds.
"""
