"""Chooses raw or exact, and the coder, for the buckets that one group of ranks gathers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_sparse.config.parameters import CODERS, METHODS, ParametersConfig
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import CommunicationError
from megatron_sparse.parameters import price
from megatron_sparse.parameters.gather import ExactWay
from megatron_sparse.parameters.price import CoderSpeed, Prices, gather_prices
from megatron_sparse.planner.link_timing import complete, gather_rows
from megatron_sparse.pricing.cluster import find
from megatron_sparse.transport import Link, Transport


class GatherChooser:
    """See the module's docstring. Collective: all ranks of the group make one, and ask it alike.

    With `method=auto` or `coder=auto` the host waits for measurements: of the link, unless
    `planner.cluster` says its costs, and of the codec.

    Args:
        config: `parameters` and `planner.cluster` are read.
        transport: the group, at least 2 ranks.

    Raises:
        CommunicationError: the ranks' settings differ.
        ConfigError: the cluster file cannot be read.
    """

    def __init__(self, config: SparseConfig, transport: Transport) -> None:
        self._chosen = config.parameters
        self._transport = transport
        self._agree(config.parameters)
        self._link: Link | None = None
        self._source = ""
        self._speeds: dict[torch.dtype, dict[str, CoderSpeed]] = {}
        self._sums: Prices | None = None
        self._priced = 0
        self._exact = 0
        if config.parameters.method == "auto" or self._prices_coders:
            self._find_link(config.planner.cluster)

    @property
    def _prices_coders(self) -> bool:
        return self._chosen.method == "exact" and self._chosen.coder == "auto"

    def _agree(self, chosen: ParametersConfig) -> None:
        names = ("method", "coder", "verify_every")
        own = [
            METHODS.index(chosen.method),
            CODERS.index(chosen.coder),
            chosen.verify_every,
        ]
        rows = complete(gather_rows(own, self._transport)).tolist()
        for rank, row in enumerate(rows):
            for name, mine, theirs in zip(names, own, row, strict=True):
                if mine != theirs:
                    raise CommunicationError(
                        f"rank {rank} of the group has another parameters.{name}",
                        expected=_shown(name, mine),
                        got=_shown(name, theirs),
                        remedy="use the same configuration on every rank",
                    )

    def _find_link(self, cluster: str | None) -> None:
        if cluster is not None:
            self._link = find(cluster).dense_link(self._transport.world_size)
            self._source = f"of {cluster}"
        else:
            self._link = complete(price.measure_link(self._transport))
            self._source = "measured"

    def choose(self, buckets: Sequence[torch.Tensor]) -> ExactWay | None:
        """The way of buckets that are gathered together; None leaves them raw.

        Args:
            buckets: the whole parameters of each.
        """
        every = self._chosen.verify_every
        if self._chosen.method == "raw":
            return None
        if self._link is None:
            self._exact += len(buckets)
            return ExactWay(self._chosen.coder, every)
        prices = self._prices(buckets, self._link)
        self._sums = prices if self._sums is None else self._sums + prices
        self._priced += len(buckets)
        if self._chosen.method == "auto" and not prices.exact_pays:
            return None
        self._exact += len(buckets)
        return ExactWay(prices.coder, every)

    def _prices(self, buckets: Sequence[torch.Tensor], link: Link) -> Prices:
        n, total = self._transport.world_size, Prices(0.0, {})
        for values_N in buckets:
            speeds = self._speeds_of(values_N.dtype)
            one = gather_prices(values_N.numel(), values_N.dtype, n, link, speeds)
            total = total + one if total.exact_s else one
        return total

    def _speeds_of(self, dtype: torch.dtype) -> dict[str, CoderSpeed]:
        if dtype not in self._speeds:
            wanted = self._chosen.coder
            coders = price.CODERS if wanted == "auto" else (wanted,)
            self._speeds[dtype] = complete(price.measure_coders(self._transport, dtype, coders))
        return self._speeds[dtype]

    def explain(self) -> str:
        """What was chosen, and why; for the log."""
        if self._sums is None or self._link is None:
            return f"{self._exact} buckets exact" if self._exact else "raw"
        sums, rate = self._sums, 1e-6 / max(self._link.beta_s, 1e-15)
        return (
            f"{self._exact} of {self._priced} buckets exact: predicted for all of them "
            f"{sums.raw_s * 1e3:.3g} ms raw, {sums.exact_s[sums.coder] * 1e3:.3g} ms exact "
            f"({sums.coder}), with links of {rate:.4g} MB/s ({self._source})"
        )


def _shown(name: str, code: float) -> object:
    known = {"method": METHODS, "coder": CODERS}.get(name)
    return int(code) if known is None else known[int(code)]
