"""Imports all that plain ranks need, once for all of them: see `ranks`."""

import gc
import os
from importlib import import_module

# torch reads these at its import.
os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
for name in ("torch.nn.parallel", "megatron_sparse", "tests.collectives.fault_ranks"):
    import_module(name)
gc.freeze()
