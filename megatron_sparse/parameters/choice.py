"""Chooses how one group of ranks gathers its buckets: raw, exact or lossy (`parameters.method`).

Exact and lossy gathers exchange compressed records, either between all ranks (*flat*), or so that
each record is sent to every other node only once (`parameters.per_node`).
"""

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
    """Chooses for the buckets of one group. Collective: all its ranks make one and call it alike.

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
        self._settings = config.parameters
        self._transport = transport
        self._agree()
        self._per_node_options = _options(config.parameters.per_node, transport.nodes)
        # Set when the first bucket is priced. `_source`, for the log: where the links are from.
        self._links: GatherLinks | None = None
        self._source = ""
        self._speeds: dict[torch.dtype, CoderSpeed] = {}
        # For `explain`: the sum of all priced buckets' prices, and numbers of buckets.
        self._sums: Prices | None = None
        self._priced = self._exact = self._lossy = 0
        self._cluster = config.planner.cluster
        self._model = None if self._cluster is None else find(self._cluster)

    def _agree(self) -> None:
        """Compares the settings of all ranks; raises a CommunicationError if they differ."""
        settings = asdict(self._settings)
        # Only numbers can be gathered: a word is sent as its index in `_WORDS`.
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
        """Returns the links of the cluster file, else measures them; sets `_source`.

        The nodes are those of the running ranks, not those that the file was measured on.
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
        """Chooses how to gather buckets that are gathered together: exact, lossy, or None for raw.

        Counts the buckets for `explain`. The first call that needs prices waits for measurements.

        Args:
            buckets: the parameters of each bucket, whole. With `method=lossy` fp32 ones are
                gathered lossily, others exactly, which takes fewer bits for them.
        """
        settings, options = self._settings, self._per_node_options
        verify_every = settings.verify_every
        # Ranks decide alike: by settings and dtypes, which are equal, and by exchanged numbers.
        if settings.method == RAW:
            return None
        are_fp32 = all(values_N.dtype == torch.float32 for values_N in buckets)
        if settings.method == LOSSY and are_fp32:
            self._lossy += len(buckets)
            # `per_node=auto` on several nodes means flat: lossy gathers have no prices to compare.
            once_per_node = options == (True,)
            return LossyWay(settings.bits, verify_every=verify_every, per_node=once_per_node)
        if settings.method != "auto" and len(options) == 1:  # nothing to choose by price
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
        """Adds up the buckets' prices, for each value of `per_node` that the settings allow."""
        n = self._transport.world_size
        by_bucket = [
            gather_prices(bucket.numel(), bucket.dtype, n, links, self._speed_of(bucket.dtype))
            for bucket in buckets
        ]
        total = reduce(add, by_bucket)
        options = self._per_node_options
        exact_s = {each: price_s for each, price_s in total.exact_s.items() if each in options}
        return Prices(total.raw_s, exact_s)

    def _speed_of(self, dtype: torch.dtype) -> CoderSpeed:
        if dtype not in self._speeds:
            self._speeds[dtype] = complete(price.measure_coder(self._transport, dtype))
        return self._speeds[dtype]

    def explain(self) -> str:
        """Returns what was chosen, and why; for the log."""
        parts = [f"{self._lossy} buckets lossy, {self._settings.bits} bits"] if self._lossy else []
        if self._sums is not None and self._links is not None:  # chosen by price
            parts.append(self._explain_prices(self._sums, self._links))
        elif self._exact:  # chosen by the settings alone
            parts.append(f"{self._exact} buckets exact ({_WAYS[self._per_node_options[0]]})")
        return "; ".join(parts) or RAW

    def _explain_prices(self, sums: Prices, links: GatherLinks) -> str:
        """Formats the number of exact buckets, the predicted times and the links' rate."""
        rate = 1e-6 / max(links.dense.beta_s, 1e-15)  # MB/s; a cluster file may have 0 s a byte
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
