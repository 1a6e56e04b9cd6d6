"""Imports all that ranks of Megatron in its CPU mode need, once for all of them: see `ranks`."""

import gc
import os
from importlib import import_module

from _pytest.assertion import install_importhook
from _pytest.config import get_config

# Who has asked CUDA for its devices cannot use it after a fork, and the CPU mode asks.
os.environ.update(CUDA_VISIBLE_DEVICES="", PYTORCH_NVML_BASED_CUDA_CHECK="1")
# An assertion that fails in a rank shows its values, as in a test.
install_importhook(get_config())
import_module("tests.imported_package")
import_module("megatron_sparse.megatron.cpu_mode").enable()
for name in ("megatron.training.training", "megatron_sparse.run.application"):
    import_module(name)
for name in ("megatron_sparse.megatron.training", "tests.megatron.train_ranks"):
    import_module(name)
# With it torch would count the GPU that the CPU mode pretends.
del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
gc.freeze()
