"""The two-shot all-reduce over peer memory, on virtual ranks of one GPU."""
