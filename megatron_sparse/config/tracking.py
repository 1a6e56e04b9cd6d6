"""The section `tracking` of the configuration: defaults and checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_sparse.config.checks import Checked, choice, in_range, whole


@dataclass
class TrackingConfig(Checked):
    """Where measurements go, and how many are taken.

    Attributes:
        console: what the writing rank prints: `plain` (one line every `sample_every` iterations,
            and the breakdown table at the end) or `off`. `megatron-sparse view` draws a picture.
        tensorboard: write scalars for TensorBoard into the run's folder.
        wandb: `auto` (online with a key, offline without), `online`, `offline`, `disabled`.
        wandb_project: project name for Weights & Biases.
        sample_every: iterations between samples of the expensive metrics: those of each bucket,
            the residual's norm (one read of the residual), and the lines of `console`; 0 never
            samples. docs/tracking.md has the costs.
        profile_iters: number of iterations that torch.profiler records on the writing rank, with
            every operator and kernel of forward, backward and synchronisation, into
            `profile.json` in the run's folder; 0 records none.
        trace_start: first iteration of the profile.
        record_gradients_iters: iterations in which every rank writes its gradients to `gradients/`
            in the run's folder, before and after selection, for `megatron-sparse profile`;
            docs/profiling.md has their size.
    """

    SECTION = "tracking"

    console: str = choice("plain", ("plain", "off"))
    tensorboard: bool = True
    wandb: str = choice("auto", ("auto", "online", "offline", "disabled"))
    wandb_project: str = "megatron_sparse"
    sample_every: int = whole(10, 0)
    profile_iters: int = whole(0, 0)
    trace_start: int = whole(1, 1)
    record_gradients_iters: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        for iteration in self.record_gradients_iters:
            in_range("tracking.record_gradients_iters", iteration, 1, integer=True)
