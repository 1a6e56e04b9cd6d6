"""A pool of the plugin's own torch process groups, and the names of new ones.

Only the members call `new_group(use_local_synchronization=True)`: a plugin cannot make the other
ranks call it. torch names such a group after its ranks and the number of groups that the calling
process is in. That number may differ between members (it does between the stages of a pipeline),
and members with different names wait for one another until the timeout. So this module names the
group itself: after its ranks, and the number of groups that the plugin has already made of these
ranks. `attach` and `detach` are collective, so borrowing is too, and the members agree on the name.
Torch's number is restored: all ranks that later make another group must have the same number.

A destroyed group would leave its addresses in the store, so groups are kept for the life of the
process and lent again.
"""

import hashlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_sparse.errors import CommunicationError, first_line

_Key = tuple[weakref.ref, tuple[int, ...], str, float]
_free: dict[_Key, list[dist.ProcessGroup]] = defaultdict(list)
_lent: dict[dist.ProcessGroup, _Key] = {}
_made: Counter[tuple[int, ...]] = Counter()


def borrow_group(ranks: list[int], backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Lends a group of these global ranks to one user: from the pool, else a new one.

    Collective over `ranks`. `return_group` gives it back to the pool.

    Raises:
        CommunicationError: not all ranks have called this within `timeout_s`.
    """
    # `destroy_process_group` ends all groups, and a program may initialise torch.distributed again:
    # so forget groups whose default group is gone. (Weak references tell this; ids are reused.)
    for old in [key for key in _free if key[0]() is None]:
        del _free[old]
    key = (weakref.ref(dist.group.WORLD), tuple(ranks), backend, timeout_s)
    if _free[key]:
        group = _free[key].pop()
    else:
        store = distributed_c10d._get_default_store()
        with _named(ranks) as name:
            store.set(f"{name}/{dist.get_rank()}", "here")  # read by `_not_made` on other ranks
            try:
                made = dist.new_group(
                    ranks,
                    timeout=timedelta(seconds=timeout_s),
                    backend=backend,
                    use_local_synchronization=True,
                    group_desc="megatron_sparse",
                )
            except RuntimeError as error:  # torch's text does not say which ranks are missing
                raise _not_made(store, name, ranks, timeout_s, error) from error
        assert isinstance(made, dist.ProcessGroup), "only members ask for a group"
        group = made
    _lent[group] = key
    return group


def _not_made(
    store: distributed_c10d.Store,
    name: str,
    ranks: list[int],
    timeout_s: float,
    cause: RuntimeError,
) -> CommunicationError:
    """The error of a group that could not be made; names the ranks that did not take part."""
    absent: list[int] = []
    with suppress(RuntimeError):  # the store cannot be reached if rank 0, its server, has ended
        absent = [rank for rank in ranks if not store.check([f"{name}/{rank}"])]
    return CommunicationError(
        "the ranks' own process group was not made",
        expected=f"ranks {ranks} attach the plugin within scheme.timeout_s ({timeout_s:g} s)",
        got=f"ranks {absent} have not come" if absent else first_line(cause),
        remedy="look at the logs of the ranks that have not come, or of all; raise "
        "scheme.timeout_s if they are only slow to start",
    )


@contextmanager
def _named(ranks: list[int]) -> Iterator[str]:
    """Inside the `with`, `new_group` uses a name on which all members agree; yields that name.

    `new_group` has no parameter for a name: so this replaces torch's function that makes names. At
    the end it restores the function, and torch's number of groups (see the module's docstring).
    """
    _made[tuple(ranks)] += 1
    members = hashlib.sha1(str(ranks).encode(), usedforsecurity=False).hexdigest()
    name = f"megatron_sparse_{_made[tuple(ranks)]}_{members}"
    original, world = distributed_c10d._hash_ranks_to_str, distributed_c10d._world
    count = world.group_count
    distributed_c10d._hash_ranks_to_str = lambda _: name
    try:
        yield name
    finally:
        distributed_c10d._hash_ranks_to_str = original
        world.group_count = count


def return_group(group: dist.ProcessGroup, *, broken: bool = False) -> None:
    """Gives a group back to the pool; drops it if `broken`: an operation in it has failed."""
    key = _lent.pop(group)
    if not broken:
        _free[key].append(group)
