"""Process groups of the plugin's own, pooled.

`new_group(use_local_synchronization=True)` needs only the members to call it, which is what a
plugin can arrange; but it names the group after its ranks alone, so a group that is destroyed and
made again meets the old one's addresses in the store and hangs. Groups are therefore kept for the
life of the process and lent again. Lending is collective in practice (attach and detach are), so
every member gets the same group.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta

import torch.distributed as dist

_Key = tuple[int, tuple[int, ...], str, float]
_free: dict[_Key, list[dist.ProcessGroup]] = defaultdict(list)
_lent: dict[dist.ProcessGroup, _Key] = {}


def borrow_group(ranks: list[int], backend: str, timeout_s: float) -> dist.ProcessGroup:
    """A group of these global ranks that nobody else uses now. Collective over `ranks`."""
    key = (id(dist.group.WORLD), tuple(ranks), backend, timeout_s)
    if _free[key]:
        group = _free[key].pop()
    else:
        made = dist.new_group(
            ranks,
            timeout=timedelta(seconds=timeout_s),
            backend=backend,
            use_local_synchronization=True,
            group_desc="megatron_sparse",
        )
        assert isinstance(made, dist.ProcessGroup), "only members ask for a group"
        group = made
    _lent[group] = key
    return group


def return_group(group: dist.ProcessGroup, *, broken: bool = False) -> None:
    """Ends the loan. A broken group, in which an operation failed, is not lent again."""
    key = _lent.pop(group)
    if not broken:
        _free[key].append(group)
