"""`megatron-sparse train`: the Hydra application.

Hydra reads the command line (overrides, `--multirun`, `--cfg`, `--help`); what it refuses becomes
the same typed error as everything else.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from megatron_sparse import composition, launch
from megatron_sparse.errors import MegatronSparseError


def train(arguments: Sequence[str]) -> None:
    """Composes and runs what the arguments say.

    Args:
        arguments: Hydra's: `GROUP=OPTION`, `SECTION.KEY=VALUE`, `megatron.FLAG=VALUE`, its flags.

    Raises:
        MegatronSparseError: the configuration or the run is wrong.
        SystemExit: with the exit code of a rank that failed; also after Hydra's own flags.
    """
    composition.register_schema()
    command = shlex.join(["megatron-sparse", "train", *arguments])
    refused: list[MegatronSparseError] = []

    @hydra.main(
        config_path=f"pkg://{composition.CONFIG_MODULE}",
        config_name=composition.CONFIG_NAME,
        version_base=None,
    )
    def application(composed: DictConfig) -> None:
        try:
            code = launch.run(composition.from_hydra(composed), command)
        except MegatronSparseError as error:
            # As an exit, which Hydra lets pass; it adds lines of its own to an exception.
            refused.append(error)
            code = error.exit_code
        if code:
            sys.exit(code)

    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    # Hydra takes its command line from here, and otherwise prints errors itself and exits.
    sys.argv = ["megatron-sparse train", *composition.hydra_overrides(arguments)]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        application()
    except (HydraException, OmegaConfBaseException) as error:
        raise composition.config_error(error) from None
    except SystemExit:
        if refused:
            raise refused[0] from None
        raise
    finally:
        sys.argv = argv
        if full_error is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
