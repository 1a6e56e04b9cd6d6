"""`megatron-sparse dashboard ENTITY/PROJECT`: a W&B workspace with the panels to look at first.

The first row answers: how much of my iteration is exposed communication, where, since when. Then:
what was gained over dense, which bucket is slow, what was sent, does the model still learn, was the
plan's prediction right, which rank was late. Names and units are those of `telemetry.metrics`, and
Megatron's own for the loss and the gradient's norm; a panel of a family (`bucket/<bucket>/...`)
finds its curves by a pattern.
"""

from dataclasses import dataclass
from typing import Any, Literal

from megatron_sparse.errors import ConfigError
from megatron_sparse.extras import require
from megatron_sparse.recording import BUCKET_STAGES
from megatron_sparse.telemetry.metrics import STEP, pattern_of

COLUMNS, PANEL_HEIGHT = 24, 8
"""W&B's grid; a section's panels share its width."""


@dataclass(frozen=True)
class Panel:
    """One plot over the iterations.

    Attributes:
        title: the title, with the unit in brackets.
        metrics: names of its curves, or one name with `<...>` in it, a pattern for many.
        plot: `line` or `stacked-area`.
        log: whether the axis is logarithmic.
    """

    title: str
    metrics: tuple[str, ...]
    plot: Literal["line", "stacked-area"] = "line"
    log: bool = False

    @property
    def pattern(self) -> str | None:
        """A regular expression if the panel shows a family, else None."""
        return pattern_of(self.metrics[0]) if "<" in self.metrics[0] else None


ITERATION_PARTS = (
    "breakdown/forward_backward_ms",
    "breakdown/optimizer_ms",
    "comm/grad_exposed_ms",
    "params/exposed_ms",
    "breakdown/other_ms",
)
"""They add up to `breakdown/iteration_ms`; the parameters' part is there if any are gathered."""
BUCKET_PARTS = tuple(f"breakdown/{stage}_ms" for stage in BUCKET_STAGES)


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Communication time": (
        Panel("Exposed communication over the iteration", ("comm/exposed_share",)),
        Panel(
            "Exposed: all, gradients' part, parameters' part (ms)",
            ("comm/exposed_ms", "comm/grad_exposed_ms", "params/exposed_ms"),
        ),
        Panel("Exposed by bucket (ms)", ("bucket/<bucket>/exposed_ms",)),
        Panel("An iteration's parts, stacked (ms)", ITERATION_PARTS, "stacked-area"),
        Panel("Iteration (ms)", ("breakdown/iteration_ms",)),
        Panel("Hidden behind compute (ms)", ("comm/overlapped_ms",)),
        Panel("Tokens per second (tokens/s)", ("train/tokens_per_s",)),
        Panel("Network time by bucket (ms)", ("bucket/<bucket>/network_ms",)),
        Panel("The buckets' stages, summed (ms)", BUCKET_PARTS, "stacked-area"),
    ),
    "Bytes on the wire": (
        Panel("Wire over dense", ("comm/wire_ratio",), log=True),
        Panel("Bits an element, own messages", ("comm/bits_per_element",), log=True),
        Panel(
            "Wire over dense, gradients and parameters together",
            ("comm/total_wire_ratio",),
            log=True,
        ),
        Panel(
            "Sent by this rank (B)",
            ("comm/wire_bytes", "comm/inside_bytes", "comm/dense_bytes"),
            log=True,
        ),
        Panel("Network time inside nodes (ms)", ("comm/inside_ms",)),
        Panel(
            "Parameters sent by this rank (B)",
            ("params/wire_bytes", "params/dense_bytes"),
            log=True,
        ),
        Panel("Sent by bucket (B)", ("bucket/<bucket>/wire_bytes",), log=True),
    ),
    "Learning": (
        Panel("Loss", ("lm loss", "train/loss")),
        Panel("Gradient norm", ("grad-norm", "train/grad_norm"), log=True),
        Panel("Skipped steps", ("train/skipped",)),
    ),
    "Compression": (
        Panel(
            "Density: sent and asked for",
            ("compression/density", "compression/target_density"),
            log=True,
        ),
        Panel("Residual over gradient norm", ("compression/residual_ratio",), log=True),
        Panel("Residual norm", ("compression/residual_norm",), log=True),
    ),
    "Plan": (
        Panel("Predicted and measured (ms)", ("planner/predicted_ms", "planner/measured_ms")),
        Panel("Buckets by scheme", ("planner/buckets/<scheme>",)),
        Panel("Predicted by bucket (ms)", ("bucket/<bucket>/predicted_ms",)),
        Panel("Measured by bucket (ms)", ("bucket/<bucket>/measured_ms",)),
    ),
    "Stragglers": (
        Panel("Delay of the last rank, all buckets (ms)", ("straggler/delay_ms",)),
        Panel("Last rank", ("straggler/rank",)),
        Panel("Buckets that skipped a rank", ("straggler/buckets_without",)),
        Panel("Delay by bucket (ms)", ("bucket/<bucket>/delay_ms",)),
    ),
}


def run(target: str, name: str, *, dry_run: bool) -> str:
    """Creates the workspace in W&B; a dry run only describes it.

    Args:
        target: `ENTITY/PROJECT`.
        name: name of the workspace.
        dry_run: do not contact W&B.

    Returns:
        Text for the user: the workspace's address or, after a dry run, its panels.

    Raises:
        ConfigError: the target is malformed, or W&B refuses.
        DependencyError: wandb-workspaces is not installed.
    """
    entity, slash, project = target.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise ConfigError(
            "this is not the name of a W&B project",
            expected="ENTITY/PROJECT, such as my-team/megatron_sparse",
            got=target,
            remedy="copy both names from the address of the project's page",
        )
    workspace = make(entity, project, name)
    if dry_run:
        count = sum(len(panels) for panels in SECTIONS.values())
        lines = [f"{count} panels in {len(SECTIONS)} sections; nothing was sent to W&B"]
        for title, panels in SECTIONS.items():
            lines += ["", title, *(f"  {panel.title}" for panel in panels)]
        return "\n".join(lines)
    try:
        workspace.save()
    except Exception as error:  # the library passes on errors of requests, gql and wandb
        raise ConfigError(
            "W&B did not accept the workspace",
            expected="a key that may write to the project, and a server that answers",
            got=f"{type(error).__name__}: {error}",
            remedy="run wandb login, or use --dry-run to see its panels without a server",
        ) from None
    return workspace.url


def make(entity: str, project: str, name: str) -> Any:
    """Makes a `wandb_workspaces.workspaces.Workspace` of `SECTIONS`; contacts no server.

    Raises:
        DependencyError: wandb-workspaces is not installed.
    """
    require("wandb_workspaces", "makes workspaces", "dashboard")
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports import v2 as reports
    from wandb_workspaces.reports.v2.interface import Layout

    def plot(panel: Panel, index: int, count: int) -> Any:
        """Makes the plot of panel `index` of a section's `count`; a row has at most three."""
        width = COLUMNS // min(count, 3)
        layout = Layout(
            x=width * (index % 3), y=PANEL_HEIGHT * (index // 3), w=width, h=PANEL_HEIGHT
        )
        curves: dict[str, Any] = (
            {"metric_regex": panel.pattern} if panel.pattern else {"y": list(panel.metrics)}
        )
        return reports.LinePlot(
            title=panel.title,
            x=STEP,
            plot_type=panel.plot,
            log_y=panel.log,
            layout=layout,
            **curves,
        )

    sections = [
        workspaces.Section(
            name=title,
            # More than two open sections would load slowly.
            is_open=position < 2,
            panels=[plot(panel, index, len(panels)) for index, panel in enumerate(panels)],
        )
        for position, (title, panels) in enumerate(SECTIONS.items())
    ]
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections)
