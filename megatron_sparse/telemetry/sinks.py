"""Dashboards: TensorBoard and Weights & Biases behind one small interface.

Both get the same metrics, see `metrics`. Configurations pass through `redact`, which hides secrets.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megatron_sparse.config.redaction import recorded_environment, redact
from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.errors import ConfigError, DependencyError
from megatron_sparse.telemetry.metrics import GROUPS, PLAN, PLAN_COLUMNS, STEP


class ScalarSink(Protocol):
    """Takes the named numbers of each iteration."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Writes `scalars` for iteration `step`; called in ascending order of `step`."""

    def log_plan(self, rows: Sequence[Sequence[Any]], step: int) -> None:
        """Writes the plan in use from iteration `step` on; rows have `metrics.PLAN_COLUMNS`."""

    def close(self) -> None:
        """Writes buffered data; called once."""


class TensorBoardSink:
    """Scalars for TensorBoard.

    Args:
        writer: any object with `SummaryWriter`'s `add_scalar`, `add_text`, `flush` and `close`,
            for example Megatron's. The caller keeps it: `close` only flushes it.
        left_out: metrics that the caller writes itself, so that none has two names.
    """

    def __init__(self, writer: Any, left_out: Collection[str] = ()) -> None:
        self._writer = writer
        self._left_out = frozenset(left_out)
        self._owned = False

    @classmethod
    def open(cls, directory: Path, *, first_iteration: int | None = None) -> TensorBoardSink:
        """Opens a new writer in `directory`.

        Args:
            directory: made if it does not exist.
            first_iteration: first iteration of a resumed run; TensorBoard then hides the points
                that an earlier attempt wrote at or after it.

        Raises:
            DependencyError: TensorBoard is not installed.
            ConfigError: the folder cannot be written.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise DependencyError(
                "TensorBoard is not installed",
                expected="an importable `tensorboard`",
                got=error,
                remedy="pip install 'megatron-sparse[train]', or set tracking.tensorboard=false",
            ) from None
        try:
            writer = SummaryWriter(log_dir=str(directory), purge_step=first_iteration)
        except OSError as error:
            raise ConfigError(
                "the TensorBoard folder cannot be written",
                expected="a writable folder",
                got=error,
                remedy="choose another run folder, or set tracking.tensorboard=false",
            ) from None
        sink = cls(writer)
        sink._owned = True
        return sink

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Adds one point to each curve."""
        for name, value in scalars.items():
            if name not in self._left_out:
                self._writer.add_scalar(name, value, step)

    def log_plan(self, rows: Sequence[Sequence[Any]], step: int) -> None:
        """Adds a text with a Markdown table, which TensorBoard renders."""
        lines = [PLAN_COLUMNS, ["---"] * len(PLAN_COLUMNS), *rows]
        text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
        self._writer.add_text(PLAN, text, step)

    def close(self) -> None:
        """Flushes the events; closes the writer if `open` made it."""
        self._writer.flush()
        if self._owned:
            self._writer.close()


class WandbSink:
    """Scalars for Weights & Biases.

    Args:
        run: a run, or the `wandb` module while it has one (Megatron's writer). The caller keeps
            it: `close` does not finish it.
        config: the resolved configuration, added to the run's own configuration under the key
            `megatron_sparse`; None adds nothing.
        left_out: metrics that the caller writes itself, so that none has two names.
    """

    def __init__(
        self,
        run: Any,
        config: Mapping[str, Any] | None = None,
        left_out: Collection[str] = (),
    ) -> None:
        self._run = run
        self._left_out = frozenset(left_out)
        self._owned = False
        # Draw curves over the iteration: wandb's own step counts rows, and restarts on resume.
        run.define_metric(STEP, hidden=True)
        for group in GROUPS:
            run.define_metric(f"{group}/*", step_metric=STEP)
        if config is not None:
            # A resumed run already has the key, perhaps with other values.
            run.config.update({"megatron_sparse": redact(config)}, allow_val_change=True)

    @classmethod
    def open(
        cls, run_dir: Path, tracking: TrackingConfig, config: Mapping[str, Any] | None
    ) -> WandbSink:
        """Starts a new W&B run whose files lie in `run_dir/wandb`.

        The folder keeps the run's id, so that a resumed training continues the same W&B run.

        Args:
            run_dir: the run's folder.
            tracking: chooses the mode, see `wandb_mode`.
            config: resolved configuration, shown beside the curves.

        Raises:
            DependencyError: wandb is not installed.
            ConfigError: the run could not be started (no network, key refused, ...).
        """
        wandb = _import_wandb()
        try:
            mode = wandb_mode(tracking)
            with hidden_from_wandb():
                run = wandb.init(
                    mode=mode,
                    dir=str(run_dir),
                    project=tracking.wandb_project,
                    name=run_dir.name,
                    id=run_id(run_dir / "wandb"),
                    # Offline, wandb cannot know whether the run exists, and would warn about it.
                    resume="allow" if mode == "online" else None,
                    config=redact(config or {}),
                )
        except (wandb.Error, OSError) as error:
            raise ConfigError(
                f"W&B did not start (tracking.wandb={tracking.wandb})",
                expected="a writable run folder and, if online, a server that answers",
                got=f"{type(error).__name__}: {error}",
                remedy="set tracking.wandb=offline and upload later with `wandb sync`",
            ) from None
        sink = cls(run)
        sink._owned = True
        return sink

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Logs one row of history at `step`."""
        shown = {name: value for name, value in scalars.items() if name not in self._left_out}
        self._run.log({**shown, STEP: step}, step=step)

    def log_plan(self, rows: Sequence[Sequence[Any]], step: int) -> None:
        """Logs a table into the row of `step`."""
        table = _import_wandb().Table(columns=list(PLAN_COLUMNS), data=[list(row) for row in rows])
        self._run.log({PLAN: table}, step=step)

    def close(self) -> None:
        """Finishes the run if `open` started it, which waits for a running upload."""
        if self._owned:
            self._run.finish()


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise DependencyError(
            "wandb is not installed",
            expected="an importable `wandb`",
            got=error,
            remedy="pip install 'megatron-sparse[train]', or set tracking.wandb=disabled",
        ) from None
    return wandb


@contextmanager
def hidden_from_wandb() -> Iterator[None]:
    """Takes the variables of Slurm that may hold secrets out of the environment for a while.

    wandb's service keeps every SLURM_* variable that it inherits in the run's metadata, SLURM_JWT
    and SLURM_EXPORT_ENV among them. Start the service inside this.
    """
    hidden = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("SLURM_") and recorded_environment({name: value}) != {name: value}
    }
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def run_id(wandb_dir: Path) -> str:
    """The id stored in `wandb_dir`; the first call makes one."""
    path = wandb_dir / "run-id.txt"
    if not path.exists():
        wandb_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4) + "\n")
    return path.read_text().strip()


def wandb_mode(tracking: TrackingConfig) -> str:
    """The mode that W&B runs in: `online`, `offline` or `disabled`.

    `tracking.wandb` decides. `auto` follows WANDB_MODE if the user set it; else it is `online` with
    credentials and `offline` without. Contacts no server.

    Raises:
        DependencyError: wandb is not installed.
    """
    if tracking.wandb != "auto":
        return tracking.wandb
    return os.environ.get("WANDB_MODE") or ("online" if _has_credentials() else "offline")


def _has_credentials() -> bool:
    """Whether wandb would find a key or token without asking; neither is kept or printed.

    `wandb.login(prompt=False)` would tell too, but prints, and asks the server.
    """
    wandb = _import_wandb()
    with hidden_from_wandb():
        settings = wandb.setup().settings
    if os.environ.get("WANDB_API_KEY") or settings.api_key or settings.identity_token_file:
        return True
    try:
        from wandb.sdk.lib.wbauth import read_netrc_auth
    except ImportError:
        # Up to 0.22 the lookup in netrc was elsewhere; its public face is deprecated since.
        return bool(wandb.api.api_key)
    return bool(read_netrc_auth(host=settings.base_url))


def open_sinks(
    run_dir: Path,
    tracking: TrackingConfig,
    config: Mapping[str, Any] | None = None,
    *,
    first_iteration: int | None = None,
) -> list[ScalarSink]:
    """Opens the dashboards that `tracking` requests; call it on the writer rank only.

    Args:
        run_dir: the run's folder; TensorBoard writes to `tensorboard/`, W&B to `wandb/` in it.
        tracking: which dashboards.
        config: resolved configuration for W&B.
        first_iteration: first iteration of a resumed run, see `TensorBoardSink.open`.

    Raises:
        DependencyError: a requested dashboard is not installed.
        ConfigError: a dashboard cannot be opened.
    """
    sinks: list[ScalarSink] = []
    if tracking.tensorboard:
        directory = run_dir / "tensorboard"
        sinks.append(TensorBoardSink.open(directory, first_iteration=first_iteration))
    if tracking.wandb != "disabled":
        sinks.append(WandbSink.open(run_dir, tracking, config))
    return sinks
