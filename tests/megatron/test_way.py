"""The way of a bucket: the modules that docs/design.md lists are those that run, and are few."""

import re
import sys
from pathlib import Path
from types import CodeType

from tests.megatron.parallel_gpt import OVERLAP, Layout
from tests.megatron.train_ranks import AT_TARGET, running, train_ranks
from tests.programs import ROOT

MOST = 30
BESIDE = ("config", "cuda_ext", "wire", "recording", "profiler_ranges", "megatron.cpu_mode")
"""Settings, kernels, constants, measurements, and what stands in for CUDA: not on the list."""


def _modules(rank: int) -> set[str]:
    """Those that run from a group's `start_grad_sync` until the optimizer changes parameters."""
    import megatron_sparse

    package, found = Path(megatron_sparse.__file__).parent, set()
    monitoring, tool = sys.monitoring, sys.monitoring.PROFILER_ID

    def starts(code: CodeType, _: int) -> object:
        file = Path(code.co_filename)
        if file.is_relative_to(package):
            found.add(".".join(file.relative_to(package).with_suffix("").parts))
        return monitoring.DISABLE

    options = AT_TARGET | {"density": 0.05, "scheme": "direct", "value_bits": 4}
    with running(Layout(ddp=OVERLAP), **options) as run:
        run.step()
        group, optimizer = run.attachment.groups[0].host, run.model.optimizer
        launch, update = group.start_grad_sync, optimizer.step_with_ready_grads

        def launched(*args: object, **kwargs: object) -> None:
            monitoring.set_events(tool, monitoring.events.PY_START)
            launch(*args, **kwargs)

        def updated() -> object:
            monitoring.set_events(tool, 0)
            return update()

        monitoring.use_tool_id(tool, "way")
        monitoring.register_callback(tool, monitoring.events.PY_START, starts)
        group.start_grad_sync, optimizer.step_with_ready_grads = launched, updated
        run.step()
        monitoring.free_tool_id(tool)
    return {each for each in found if not each.startswith(BESIDE)}


def test_the_list_of_modules_is_the_way_of_a_bucket() -> None:
    found = set.union(*train_ranks(_modules, 2))
    page = (ROOT / "docs" / "design.md").read_text("utf-8")
    rows = page.split("| stage | modules |")[1].split("\n\n")[0].splitlines()[2:]
    listed = [name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[2])]
    assert sorted(listed) == sorted(found)
    assert len(listed) <= MOST
