"""A training run of ours: composing its configuration, launching its ranks, and what it records."""
