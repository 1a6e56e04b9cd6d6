"""The checkpoint that a run starts from, and the command that resumes a run which has stopped.

`find` chooses the checkpoint without writing; `describe` puts the choice in a line; `go_on` says
after a stop which checkpoint is saved. A folder of checkpoints has a tracker, Megatron's file with
the iteration of the checkpoint to load. Megatron may also save temporary checkpoints, in another
folder with its own tracker (`checkpoint_folder.with_temporary`).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_sparse.config.redaction import redact_command
from megatron_sparse.config.run import RunConfig
from megatron_sparse.errors import CheckpointError, ConfigError
from megatron_sparse.megatron import arguments, checkpoint_folder
from megatron_sparse.megatron.checkpoint_folder import TRACKER, checkpoint


@dataclass(frozen=True)
class Start:
    """The iteration and the checkpoint that a run starts from; the defaults: from scratch.

    Attributes:
        iteration: number of iterations done before the start.
        checkpoint: folder of the checkpoint; None from scratch.
        own: whether the run itself saved it (the run is resumed), not the run of `training.load`.
        repairs: folder of checkpoints -> iteration to write into its tracker.
        warnings: a line for each folder with a damaged tracker or checkpoint.
    """

    iteration: int = 0
    checkpoint: Path | None = None
    own: bool = False
    repairs: dict[Path, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def is_done(self, config: RunConfig) -> bool:
        """Whether the resumed run has all its iterations, so that nothing is left to do."""
        return self.own and self.iteration >= config.training.iterations

    def repair(self) -> None:
        """Prints the warnings, and writes `repairs` into the trackers, by which Megatron loads.

        Raises:
            OSError: a tracker cannot be written.
        """
        for line in self.warnings:
            print(f"warning: {line}", flush=True)
        for folder, iteration in self.repairs.items():
            checkpoint_folder.track(folder, iteration)


def run_folder(config: RunConfig) -> Path:
    """The run's folder, absolute; it need not exist."""
    return (Path(config.runs_dir) / config.name).absolute()


def find(config: RunConfig) -> Start:
    """Chooses the run's own newest checkpoint, else `training.load`'s, else none; writes nothing.

    Raises:
        CheckpointError: `training.load` or `megatron.ckpt_step` names an incomplete checkpoint.
        ConfigError: `resume=must`, and the run has no complete checkpoint; or `training.load` is in
            the run's own folder, which is renamed unless the run is resumed.
    """
    checkpoints = run_folder(config) / arguments.CHECKPOINTS
    warnings: tuple[str, ...] = ()
    if config.resume != "never":
        found = _find_own(config, checkpoints)
        if found.checkpoint is not None:
            return found
        warnings = found.warnings
    if config.resume == "must":
        raise ConfigError(
            f"run {config.name} cannot be resumed",
            expected=f"a complete checkpoint in {checkpoints}",
            got="; ".join(warnings) or "none",
            remedy="set resume=auto to start it from scratch, and training.save_interval to save "
            "checkpoints",
        )
    if config.training.load is not None:
        folder = Path(config.training.load)
        if folder.resolve().is_relative_to(run_folder(config).resolve()):
            raise ConfigError(
                "training.load is in the run's own folder, which would be moved aside",
                expected="a folder outside it, or resume=auto, which goes on from the run's own",
                got=f"training.load={folder} in a run named {config.name}, resume={config.resume}",
                remedy="choose another name; or set resume=auto and leave training.load out",
            )
        return _find_loaded(config, folder)
    return Start(warnings=warnings)


def _find_own(config: RunConfig, checkpoints: Path) -> Start:
    """The start from the run's newest complete checkpoint, or from that of iteration `ckpt_step`.

    Its `checkpoint` is None if no checkpoint is complete.
    """
    step = config.megatron.get("ckpt_step")
    if step and arguments.has_checkpoint(config, checkpoints):
        return Start(int(step), _of_step(checkpoints, int(step)), own=True)
    best, repairs, warnings = Start(), {}, []
    for folder in checkpoint_folder.with_temporary(checkpoints, config.megatron):
        # A run killed in its first save leaves a checkpoint without a tracker: it is not skipped.
        if not (folder / TRACKER).is_file() and not checkpoint_folder.saved_iterations(folder):
            continue
        choice = checkpoint_folder.choose(folder)
        if choice.damage:
            taken = choice.iteration
            outcome = "there is no other" if taken is None else f"taken: {taken}"
            warnings.append(f"{folder}: {choice.damage}; {outcome}")
        if choice.iteration is None:
            continue
        if choice.damage:
            repairs[folder] = choice.iteration
        if best.checkpoint is None or choice.iteration >= best.iteration:
            best = Start(choice.iteration, checkpoint(folder, choice.iteration), own=True)
    return replace(best, repairs=repairs, warnings=tuple(warnings))


def _find_loaded(config: RunConfig, folder: Path) -> Start:
    """The start from a checkpoint in the folder of `training.load`.

    With Megatron's `finetune` the run counts iterations from 0.
    """
    counts_anew = bool(config.megatron.get("finetune"))
    step = config.megatron.get("ckpt_step")
    if step:
        return Start(0 if counts_anew else int(step), _of_step(folder, int(step)))
    if not (folder / TRACKER).is_file():
        return Start()  # Megatron finds a temporary checkpoint itself; else `check_load` raises
    if checkpoint_folder.is_release(folder):
        return Start(0, folder / checkpoint_folder.RELEASE)
    choice = checkpoint_folder.choose(folder)
    if choice.damage:
        remedy = "set training.load to another folder, or to null"
        if choice.iteration is not None:
            remedy = f"write {choice.iteration}, the newest complete one, into {folder / TRACKER}"
        raise CheckpointError(
            f"the checkpoint in {folder} is not complete",
            expected=f"the checkpoint that {TRACKER} names",
            got=choice.damage,
            remedy=remedy,
        )
    assert choice.iteration is not None
    return Start(0 if counts_anew else choice.iteration, checkpoint(folder, choice.iteration))


def _of_step(folder: Path, step: int) -> Path:
    """The folder of the checkpoint of iteration `step`; raises a `CheckpointError` if damaged."""
    path = checkpoint(folder, step)
    problem = checkpoint_folder.damage(path)
    if problem is not None:
        raise CheckpointError(
            f"the checkpoint of megatron.ckpt_step={step} is not complete",
            expected=f"a complete checkpoint {path}",
            got=problem,
            remedy=f"choose another iteration, or leave out the key for the one in {TRACKER}",
        )
    return path


def describe(config: RunConfig, start: Start) -> str:
    """A line about the checkpoint that the run starts from; empty from scratch."""
    if start.checkpoint is None:
        return ""
    total = config.training.iterations
    if start.is_done(config):
        return (
            f"nothing left to do: the checkpoint of {config.name} has iteration {start.iteration} "
            f"of {total}; to train on, raise training.iterations and, because that changes the "
            "learning rate's schedule, set megatron.override_opt_param_scheduler=true"
        )
    if not start.own:
        return f"starts from {start.checkpoint} at iteration {start.iteration} of {total}"
    return f"resumed at {start.iteration} of {total}"


def newest(config: RunConfig, run_dir: Path) -> int | None:
    """The iteration of the newest complete checkpoint in a run's folder, temporary ones included.

    None if there is none.
    """
    folders = checkpoint_folder.with_temporary(run_dir / arguments.CHECKPOINTS, config.megatron)
    found = [checkpoint_folder.choose(folder).iteration for folder in folders]
    return max((each for each in found if each is not None), default=None)


_OF_THE_START = (
    *("resume", "megatron.ckpt_step"),
    *("megatron.no_load_optim", "megatron.no_load_rng"),
)
"""Keys that choose a checkpoint or a part of it, which the command that goes on must not repeat."""


def _key(word: str) -> str:
    """The key of a word of the command line, such as `resume` of `++resume=must`."""
    return word.partition("=")[0].lstrip("+").replace("-", "_")


def go_on(config: RunConfig, run_dir: Path, command: str) -> str:
    """Says which checkpoint is saved of a run that stopped, and which command resumes the run.

    `command` is the one that started the run.
    """
    done = newest(config, run_dir)
    if done is None:
        return (
            "no checkpoint is saved; training.save_interval=N saves one every N iterations, "
            "training.save_signal=SIGINT one on Ctrl-C"
        )
    total = config.training.iterations
    if done >= total:
        return f"the last checkpoint has iteration {done} of {total}: nothing is left to do"
    words = [word for word in shlex.split(command) if _key(word) not in _OF_THE_START]
    # Some runs of a sweep may not have begun; `resume=must` would refuse them.
    is_sweep = not {"--multirun", "-m"}.isdisjoint(words)
    again = redact_command(shlex.join([*words, f"resume={'auto' if is_sweep else 'must'}"]))
    return f"the last checkpoint has iteration {done} of {total}; to go on:\n  {again}"
