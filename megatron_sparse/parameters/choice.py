"""Chooses raw, exact or lossy for buckets that one group of ranks gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import reduce
from operator import add

import torch

from megatron_sparse.config.parameters import METHODS, PER_NODE
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import CommunicationError
from megatron_sparse.parameters import price
from megatron_sparse.parameters.agreement import LOSSY, RAW
from megatron_sparse.parameters.gather import Way
from megatron_sparse.parameters.lossy import LossyWay
from megatron_sparse.parameters.price import (
    CoderSpeed,
    GatherLinks,
    Prices,
    gather_prices,
    several_levels,
)
from megatron_sparse.planner.link_timing import complete, gather_rows
from megatron_sparse.pricing.cluster import find
from megatron_sparse.transport import Topology, Transport
from megatron_sparse.transport.topology import members_of

_WORDS = {"method": METHODS, "per_node": PER_NODE}
"""Settings that are words; ranks exchange their numbers."""
_WAYS = ("flat", "once per node")
"""In the log, by whether a record crosses to each other node once."""


class GatherChooser:
    """See the module's docstring. Collective: all ranks of the group make one, and ask it alike.

    With `method=auto`, or where `per_node=auto` is to be chosen, the host waits for measurements:
    of the link, unless `planner.cluster` says its costs, and of the codec.

    Args:
        config: `parameters` and `planner.cluster` are read.
        transport: the group, at least 2 ranks.

    Raises:
        CommunicationError: the ranks' settings differ.
        ConfigError: the cluster file cannot be read.
    """

    def __init__(self, config: SparseConfig, transport: Transport) -> None:
        """Compares the ranks' settings."""
        self._chosen = config.parameters
        self._transport = transport
        self._agree()
        self._per_node_options = _options(config.parameters.per_node, transport.nodes)
        # Measured or read when the first bucket is priced; and where the links are from, in words.
        self._links: GatherLinks | None = None
        self._source = ""
        self._speeds: dict[torch.dtype, CoderSpeed] = {}
        # For `explain`: the prices of all buckets that were priced, and numbers of buckets.
        self._sums: Prices | None = None
        self._priced = self._exact = self._lossy = 0
        self._cluster = config.planner.cluster
        self._model = None if self._cluster is None else find(self._cluster)

    def _agree(self) -> None:
        """Raises if another rank has other settings; words travel as their number in `_WORDS`."""
        settings = asdict(self._chosen)
        codes = [
            _WORDS[name].index(value) if name in _WORDS else value
            for name, value in settings.items()
        ]
        rows = complete(gather_rows(codes, self._transport)).tolist()
        for rank, row in enumerate(rows):
            for name, mine, theirs in zip(settings, codes, row, strict=True):
                if mine != theirs:
                    raise CommunicationError(
                        f"rank {rank} of the group has another parameters.{name}",
                        expected=_shown(name, mine),
                        got=_shown(name, theirs),
                        remedy="use the same configuration on every rank",
                    )

    def _find_links(self) -> GatherLinks:
        """The links of the cluster file, else measured ones; sets `_source` to where they are from.

        The nodes are those of the running ranks, whatever the file was measured on.
        """
        model, nodes = self._model, self._transport.nodes
        if model is None:
            self._source = "measured"
            return complete(price.measure_gather_links(self._transport))
        self._source = f"of {self._cluster}"
        topology = None
        if several_levels(nodes):
            node_sizes = tuple(map(len, members_of(nodes)))
            topology = Topology(node_sizes, model.intra, model.inter, model.nic)
        return GatherLinks(model.dense_link(self._transport.world_size), topology)

    def choose(self, buckets: Sequence[torch.Tensor]) -> Way | None:
        """Chooses the way of buckets that are gathered together; None leaves them raw.

        Counts them for `explain`. The first call that needs prices waits for measurements.

        Args:
            buckets: the whole parameters of each; with `method=lossy` fp32 ones are lossy, others
                exact, which takes fewer bits there.
        """
        settings, options = self._chosen, self._per_node_options
        verify_every = settings.verify_every
        # Ranks decide alike: by settings and dtypes, which are equal, and by exchanged numbers.
        if settings.method == RAW:
            return None
        are_fp32 = all(values_N.dtype == torch.float32 for values_N in buckets)
        if settings.method == LOSSY and are_fp32:
            self._lossy += len(buckets)
            # Once per node only where that is demanded: lossy gathers have no prices.
            once_per_node = options == (True,)
            return LossyWay(settings.bits, verify_every=verify_every, per_node=once_per_node)
        if settings.method != "auto" and len(options) == 1:  # nothing is left to choose
            self._exact += len(buckets)
            return Way(verify_every=verify_every, per_node=options[0])
        self._links = self._links or self._find_links()
        prices = self._prices(buckets, self._links)
        self._sums = prices if self._sums is None else self._sums + prices
        self._priced += len(buckets)
        if settings.method == "auto" and not prices.exact_pays:
            return None
        self._exact += len(buckets)
        return Way(verify_every=verify_every, per_node=prices.per_node)

    def _prices(self, buckets: Sequence[torch.Tensor], links: GatherLinks) -> Prices:
        """The prices of all buckets together, in the ways that `parameters.per_node` allows."""
        n = self._transport.world_size
        by_bucket = [
            gather_prices(bucket.numel(), bucket.dtype, n, links, self._speed_of(bucket.dtype))
            for bucket in buckets
        ]
        total = reduce(add, by_bucket)
        options = self._per_node_options
        exact_s = {way: way_s for way, way_s in total.exact_s.items() if way in options}
        return Prices(total.raw_s, exact_s)

    def _speed_of(self, dtype: torch.dtype) -> CoderSpeed:
        if dtype not in self._speeds:
            self._speeds[dtype] = complete(price.measure_coder(self._transport, dtype))
        return self._speeds[dtype]

    def explain(self) -> str:
        """What was chosen, and why; for the log."""
        # Exact buckets were either chosen by price, or by the configuration alone.
        parts = [f"{self._lossy} buckets lossy, {self._chosen.bits} bits"] if self._lossy else []
        if self._sums is not None and self._links is not None:
            parts.append(self._explain_prices(self._sums, self._links))
        elif self._exact:
            parts.append(f"{self._exact} buckets exact ({_WAYS[self._per_node_options[0]]})")
        return "; ".join(parts) or RAW

    def _explain_prices(self, sums: Prices, links: GatherLinks) -> str:
        """The number of exact buckets, the predicted times and the links' rate, in a sentence."""
        rate = 1e-6 / max(links.dense.beta_s, 1e-15)  # a link may take no time for a byte
        return (
            f"{self._exact} of {self._priced} buckets exact: predicted for all of them "
            f"{sums.raw_s * 1e3:.3g} ms raw, {sums.exact_s[sums.per_node] * 1e3:.3g} ms exact "
            f"({_WAYS[sums.per_node]}), with links of {rate:.4g} MB/s ({self._source})"
        )


def _options(per_node: str, nodes: Sequence[int]) -> tuple[bool, ...]:
    """The values of `Way.per_node` that may be taken: with several ones a price decides."""
    if per_node == "never" or not several_levels(nodes):
        return (False,)
    return (True,) if per_node == "always" else (False, True)


def _shown(name: str, code: float) -> object:
    return _WORDS[name][int(code)] if name in _WORDS else int(code)
