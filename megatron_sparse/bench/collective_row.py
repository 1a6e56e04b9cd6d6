"""A line of `bench collectives`: nccl-tests' table with the columns of a compressed collective."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_sparse.bench.collective_sweep import Case
from megatron_sparse.bench.table import cell

HEADER = (
    f"#{'size(B)':>10} {'count':>10} {'type':>5} {'op':>14} {'scheme':>18} {'density':>8} "
    f"{'wire(B)':>11} {'time(us)':>10} {'p99(us)':>10} {'algbw':>7} {'busbw':>7} {'#wrong':>6} "
    f"{'dense(us)':>10} {'speedup':>7} {'/floor':>6} {'net/floor':>9} {'host(us)':>9}"
)


@dataclass
class Row:
    """One case; times are medians over the rounds of the slowest rank, in microseconds.

    `carried_by` is the scheme that did it: another one than `scheme` only for `auto`. Stages are
    means over the ranks; `host_us` is what is in none of them. The copy is one of the gradient's
    bytes by all ranks at once. Times of a `modelled` row are the virtual cluster's.
    """

    op: str
    scheme: str
    dtype: str
    density: float
    count: int
    bytes: int
    world_size: int
    wire_bytes: int
    time_us: float | None
    dense_us: float | None
    encode_us: float | None
    network_us: float | None
    decode_us: float | None
    host_us: float | None
    transport: str
    modelled: bool
    wrong: int
    carried_by: str
    sent_density: float
    threshold_us: float | None = None
    prune_us: float | None = None
    p99_us: float | None = None
    copy_us: float | None = None
    floor_us: float | None = None
    network_floor_us: float | None = None
    noisy: bool = False

    @classmethod
    def of(cls, case: Case, **fields: Any) -> Row:
        """A row of a case."""
        return cls(
            op=str(case.form), scheme=case.scheme, dtype=case.dtype, density=case.density,
            count=case.numel, bytes=case.nbytes, **fields,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return asdict(self)

    def line(self) -> str:
        """The table's line; bandwidths in GB/s: of the gradient, and of what was sent."""
        time_us, name = self.time_us, self.scheme
        if self.carried_by != self.scheme:
            name = f"{self.scheme}:{self.carried_by}"
        return (
            f"{self.bytes:>11} {self.count:>10} {self.dtype:>5} {self.op:>14} {name:>18} "
            f"{self.density:>8g} {self.wire_bytes:>11} {cell(time_us, 10, 0)} "
            f"{cell(self.p99_us, 10, 0)} "
            f"{cell(_ratio(self.bytes, time_us, 1e-3), 7, 3)} "
            f"{cell(_ratio(self.wire_bytes, time_us, 1e-3), 7, 3)} {self.wrong:>6} "
            f"{cell(self.dense_us, 10, 0)} {cell(_ratio(self.dense_us, time_us), 7, 2)} "
            f"{cell(_ratio(time_us, self.floor_us), 6, 2)} "
            f"{cell(_ratio(self.network_us, self.network_floor_us), 9, 2)} "
            f"{cell(self.host_us, 9, 0)}{'  noisy' if self.noisy else ''}"
        )


def _ratio(above: float | None, below: float | None, factor: float = 1.0) -> float | None:
    return None if above is None or not below else above / below * factor
