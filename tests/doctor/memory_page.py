"""The table of docs/memory.md: `python -m tests.doctor.memory_page` writes it anew."""

from pathlib import Path

from megatron_sparse.doctor.memory import of_run
from megatron_sparse.run.composition import compose
from megatron_sparse.telemetry.quantities import size

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"
COMMON = ("model=gpt2_xl", "data=mock", "cluster.ranks_per_node=8")
NO_OVERLAP = "training.overlap_grad_reduce=false"
SHARDED = "training.use_distributed_optimizer=true"
NO_UNDO = "megatron.rerun_mode=disabled"
RUNS = (
    (),
    (SHARDED,),
    (NO_OVERLAP, SHARDED),
    ("scheme.capacity=null", NO_OVERLAP, SHARDED),
    (NO_UNDO,),
    (NO_UNDO, SHARDED, "compression.residual_dtype=bf16"),
    ("cluster.device=cpu",),
    ("cluster.device=cpu", NO_OVERLAP),
)
"""Overrides beside `COMMON`; on `cluster.device=cuda` unless they say otherwise."""
ITEMS = ("residual", "undo", "messages", "received", "sums", "workspace")
BEGIN, END = "<!-- table: tests/doctor/memory_page.py -->\n", "<!-- end of table -->\n"


def table() -> str:
    """The table's Markdown, computed."""
    header = ["overrides", *ITEMS, "bytes a parameter", "in all"]
    lines = [header, ["---"] * len(header)]
    for overrides in RUNS:
        device = () if "cluster.device=cpu" in overrides else ("cluster.device=cuda",)
        found = of_run(compose([*COMMON, *device, *overrides]))
        each = [found.nbytes.get(item) for item in ITEMS]
        lines.append(
            [
                " ".join(f"`{override}`" for override in overrides) or "none",
                *("" if n is None else f"{found.of_parameter(n):.2f}" for n in each),
                f"{found.of_parameter(found.total):.2f}",
                size(found.total),
            ]
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def parts(text: str) -> tuple[str, str, str]:
    """The page before the table, the table, and the page behind it."""
    before, rest = text.split(BEGIN)
    shown, after = rest.split(END)
    return before, shown, after


if __name__ == "__main__":
    first, _, last = parts(PAGE.read_text("utf-8"))
    PAGE.write_text(first + BEGIN + table() + END + last, "utf-8")
