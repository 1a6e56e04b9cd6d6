"""Hydra's groups: `megatron-sparse train GROUP=OPTION ...`, see `train.yaml`."""
