"""Dashboards: TensorBoard and Weights & Biases behind one small interface.

Both get the same metrics, see `metrics`. Configurations pass through `redact`, which hides secrets.
"""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megatron_sparse.config.redaction import recorded_environment, redact
from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.extras import require
from megatron_sparse.telemetry.metrics import GROUPS, STEP

OF_MEGATRON = frozenset({"train/loss", "train/grad_norm", "train/learning_rate", "comm/wire_ratio"})
"""Metrics that Megatron itself writes to its dashboards: `lm loss`, `grad-norm`, `learning-rate`,
and all of a step's loss dictionary, to which the plugin adds the ratio."""


class ScalarSink(Protocol):
    """Takes the named numbers of each iteration."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Writes `scalars` for iteration `step`; called in ascending order of `step`."""

    def close(self) -> None:
        """Writes buffered data; called once."""


class TensorBoardSink:
    """Scalars for TensorBoard.

    Args:
        writer: Megatron's `SummaryWriter`. Megatron keeps it: `close` only flushes it.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Adds one point to each curve."""
        for name, value in scalars.items():
            if name not in OF_MEGATRON:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes the events."""
        self._writer.flush()


class WandbSink:
    """Scalars for Weights & Biases.

    Args:
        run: Megatron's writer: the `wandb` module while it has a run. Megatron finishes the run.
        config: the resolved configuration, added to the run's own configuration under the key
            `megatron_sparse`.
    """

    def __init__(self, run: Any, config: Mapping[str, Any]) -> None:
        self._run = run
        # Draw curves over the iteration: wandb's step counts rows, and restarts on resume.
        run.define_metric(STEP, hidden=True)
        for group in GROUPS:
            run.define_metric(f"{group}/*", step_metric=STEP)
        # A resumed run already has the key, perhaps with other values.
        run.config.update({"megatron_sparse": redact(config)}, allow_val_change=True)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Logs one row of history at `step`."""
        shown = {name: value for name, value in scalars.items() if name not in OF_MEGATRON}
        self._run.log({**shown, STEP: step}, step=step)

    def close(self) -> None:
        """Does nothing: Megatron finishes its run."""


@contextmanager
def hidden_from_wandb() -> Iterator[None]:
    """Removes SLURM_* variables that may hold secrets from the environment, in the `with` body.

    wandb's service stores every SLURM_* variable that it inherits in the run's metadata, SLURM_JWT
    and SLURM_EXPORT_ENV among them. So start the service in the `with` body.
    """
    slurm = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
    recorded = recorded_environment(slurm)  # with secrets left out or redacted
    hidden = {name: value for name, value in slurm.items() if recorded.get(name) != value}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def run_id(wandb_dir: Path) -> str:
    """Returns the W&B run's id from a file in `wandb_dir`; the first call makes id and file."""
    path = wandb_dir / "run-id.txt"
    if not path.exists():
        wandb_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4) + "\n")
    return path.read_text().strip()


def wandb_mode(tracking: TrackingConfig) -> str:
    """Returns the mode that W&B runs in, such as `online`, `offline` or `disabled`.

    That is `tracking.wandb`. For `auto` it is WANDB_MODE if the user set it; else `online` with
    credentials and `offline` without. Contacts no server.

    Raises:
        DependencyError: wandb is not installed.
    """
    if tracking.wandb != "auto":
        return tracking.wandb
    return os.environ.get("WANDB_MODE") or ("online" if _has_credentials() else "offline")


def _has_credentials() -> bool:
    """Whether wandb would find a key or token without asking the user; stores and prints neither.

    Not `wandb.login(prompt=False)`, which prints, and contacts the server.
    """
    require("wandb", "keeps the runs", "train", "set tracking.wandb=disabled")
    import wandb

    with hidden_from_wandb():
        settings = wandb.setup().settings
    if os.environ.get("WANDB_API_KEY") or settings.api_key or settings.identity_token_file:
        return True
    try:
        from wandb.sdk.lib.wbauth import read_netrc_auth
    except ImportError:
        # wandb up to 0.22 reads netrc elsewhere; later versions deprecate `api.api_key`.
        return bool(wandb.api.api_key)
    return bool(read_netrc_auth(host=settings.base_url))
