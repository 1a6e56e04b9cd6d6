"""The process of one rank of a run with a rival.

`python -m megatron_sparse.bench.convergence.rivals.rank SETTING ARGUMENT...`, with RANK and so on
in the environment. The arguments are those of `train`.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys

from megatron_sparse.bench.convergence.settings import BY_NAME
from megatron_sparse.errors import MegatronSparseError
from megatron_sparse.megatron import training
from megatron_sparse.run import composition, preparation, worker


def main(name: str, arguments: list[str]) -> int:
    """Trains on this rank; returns the exit code.

    Args:
        name: of a setting with a rival.
        arguments: of `train`.
    """
    spec = BY_NAME[name].rival
    assert spec is not None, "only settings with a rival are started so"
    try:
        config = preparation.decide(composition.compose(arguments))
        os.environ.update(preparation.rank_environment(config))
        training.prepare_host(config.cluster.device)
        from megatron_sparse.bench.convergence.rivals.attachment import RivalAttachment
        from megatron_sparse.megatron import plugin

        plugin.Attachment = functools.partial(RivalAttachment, spec)
        return worker.run_started(config, shlex.join(["megatron-sparse", "train", *arguments]))
    except MegatronSparseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
