"""Trains a model: `python scripts/train.py model=gpt_tiny data=prose`, see `--help`.

The same as `megatron-sparse train`, from a checkout that need not be installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_sparse.cli.main import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
