"""`python -m megatron_sparse.run.rank runs/NAME/config.yaml`: the process of one rank.

The launcher starts it. Importing torch takes seconds, so the imports here avoid it: `main` first
makes sure that Ctrl-C ends the rank without a traceback, and that it dies with its launcher.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path

from megatron_sparse.run.interrupt import end_quickly, end_with_parent, ending_where_stuck
from megatron_sparse.run.rank_log import rank_log


def main() -> None:
    """Runs the rank, and exits with its code."""
    # Until `worker.main` has imported torch, Ctrl-C ends the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    end_quickly()
    config_path = Path(sys.argv[1])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with rank_log(config_path.parent, rank, ranks), ending_where_stuck():
        try:
            code = import_module("megatron_sparse.run.worker").main(config_path)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException:  # torch's CheckpointException is no Exception
            # Printed inside `rank_log`, so into the log, whose end the launcher prints.
            traceback.print_exc()
            code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
