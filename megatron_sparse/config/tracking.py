"""The section `tracking` of the configuration: defaults and checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_sparse.config.checks import in_range, is_flag, one_of

CONSOLES = ("auto", "live", "plain", "off")


@dataclass
class TrackingConfig:
    """Where measurements go, and how many are taken.

    Attributes:
        console: what the writing rank prints while it trains: `live` (a view that redraws itself,
            for a terminal), `plain` (one line every `sample_every` iterations) or `auto` (`live`
            on a terminal, else `plain`), each followed by the breakdown table at the end; `off`
            prints nothing.
        tensorboard: write scalars for TensorBoard into the run's folder.
        wandb: `auto` (online with a key, offline without), `online`, `offline`, `disabled`.
        wandb_project: project name for Weights & Biases.
        sample_every: iterations between samples of the expensive metrics: those of each bucket,
            its threshold, the residual's norm (one read of the residual), and the lines of
            `console=plain`; 0 never samples. docs/tracking.md has the costs.
        trace_iters: number of iterations whose timeline goes to `trace.json` in the run's folder,
            for chrome://tracing and ui.perfetto.dev; 0 writes none.
        profile_iters: number of iterations that torch.profiler records on the writing rank, with
            every operator and kernel of forward, backward and synchronisation, into
            `profile.json` in the run's folder; 0 records none.
        trace_start: first iteration of the timeline and of the profile.
        nvtx: open an NVTX range around every stage, for Nsight Systems; needs a GPU.
        record_gradients_iters: iterations in which every rank writes its gradients to `gradients/`
            in the run's folder, before and after selection, for `megatron-sparse profile`;
            docs/profiling.md has their size.
    """

    console: str = "auto"
    tensorboard: bool = True
    wandb: str = "auto"
    wandb_project: str = "megatron_sparse"
    sample_every: int = 10
    trace_iters: int = 0
    profile_iters: int = 0
    trace_start: int = 1
    nvtx: bool = False
    record_gradients_iters: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        one_of("tracking.console", self.console, CONSOLES)
        is_flag("tracking.tensorboard", self.tensorboard)
        one_of("tracking.wandb", self.wandb, ("auto", "online", "offline", "disabled"))
        in_range("tracking.sample_every", self.sample_every, 0, integer=True)
        in_range("tracking.trace_iters", self.trace_iters, 0, integer=True)
        in_range("tracking.profile_iters", self.profile_iters, 0, integer=True)
        in_range("tracking.trace_start", self.trace_start, 1, integer=True)
        is_flag("tracking.nvtx", self.nvtx)
        for iteration in self.record_gradients_iters:
            in_range("tracking.record_gradients_iters", iteration, 1, integer=True)
