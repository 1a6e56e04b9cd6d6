"""Other people's ways to compress, for `bench convergence` to compare with.

They run in Megatron's own training loop, in the place of the plugin's collectives, from the end of
the warm-up on. They are written for clarity, in fp32 over gloo, and are no part of the plugin.
"""
