"""The plugin in torch's own DistributedDataParallel: see `state`."""
