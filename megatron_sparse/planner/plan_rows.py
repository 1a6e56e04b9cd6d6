"""The rows that `megatron-sparse plan` shows: of a run, or of buckets by size.

A row is a mapping: `bucket, numel, density, predicted_us` (scheme -> time), `chosen, reason`, and
the bucket's other facts (`op, world_size, kept_numel, element_bytes, partial_bytes, value_bits,
lanes`). At `compression.level` node or instance a row is that of a part: `world_size` ranks
exchange it, in one of `lanes` lanes. Predicted times are those of a cost model.

The table has every scheme's predicted time for each bucket, the chosen one marked. A run without a
cluster file has none: its planner compares bytes, and the reason has them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.plan_state import read_plan
from megatron_sparse.planner.prices import DENSE, candidates, explain, least, prices_us, prior
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.telemetry.console import plain_table

Row = dict[str, Any]
NAMES_SHOWN = 4


@dataclass(frozen=True)
class Pricing:
    """The cluster and candidates that buckets are priced with; schemes have their default options.

    Attributes:
        cluster: the costs of links, codecs and CPU.
        schemes: the candidates; None takes all.
        value_bits: as `compression.value_bits`; None takes the run's, else whole values.
    """

    cluster: ClusterModel
    schemes: Sequence[str] | None = None
    value_bits: int | None = None

    def row(self, name: str, shape: BucketShape, profile: SparsityProfile, basis: str) -> Row:
        """Prices one bucket with all candidates; returns its row (see the module).

        `basis` is the source of the profile, in words.
        """
        if self.value_bits is not None:
            shape = replace(shape, value_bits=self.value_bits)
        prices = prices_us(
            shape,
            profile,
            cluster=self.cluster,
            options=SchemeConfig(),
            names=candidates(self.schemes, shape.value_bits),
        )
        chosen = least(prices, prices.keys())
        return {
            "bucket": name,
            **asdict(shape),
            "op": str(shape.op),
            "density": profile.density,
            "predicted_us": prices,
            "chosen": chosen,
            "reason": explain(chosen, prices, f"density {profile.density:.3g} {basis}"),
        }


def of_run(path: Path, pricing: Pricing, ranks: int | None) -> list[Row]:
    """The plan of a run's buckets with these prices.

    `path`: the run's folder, or its `plan.json`. `ranks`: the number of all ranks; None: the run's.

    Raises:
        ConfigError: there is no plan, or its lanes do not divide `ranks`.
        ProfileError: a profile in the plan is damaged.
    """
    priced = []
    for name, row in read_plan(path).items():
        # Rows of older runs lack the fields that have defaults.
        values = {each.name: row[each.name] for each in fields(BucketShape) if each.name in row}
        values["op"] = CollectiveOp(row["op"])
        shape = BucketShape(**values)
        if ranks:
            if ranks % shape.lanes:  # every lane has an equal number of the `ranks`
                raise ConfigError(
                    f"plan: bucket {name} is a part of a bucket, one of {shape.lanes} in each node",
                    expected=f"--ranks in multiples of {shape.lanes}",
                    got=ranks,
                )
            shape = replace(shape, world_size=ranks // shape.lanes)
        sampled = row.get("profile")
        profile = SparsityProfile.from_dict(sampled) if sampled else prior(shape, row["density"])
        basis = "sampled in the run" if sampled else "assumed uniform"
        priced.append(pricing.row(name, shape, profile, basis))
    return priced


def of_sizes(
    sizes: Sequence[int], pricing: Pricing, ranks: int, density: float, op: CollectiveOp
) -> list[Row]:
    """The rows of fp32 buckets of these sizes in bytes, at one density of all their elements.

    Raises:
        ConfigError: a bucket is smaller than one value.
    """
    rows = []
    for nbytes in sizes:
        if nbytes < 4:
            raise ConfigError(
                "plan: --bucket-bytes has a bucket without a value",
                expected="at least 4 bytes, one fp32 value",
                got=nbytes,
            )
        shape = BucketShape(nbytes // 4, kept_numel=0, element_bytes=4, op=op, world_size=ranks)
        rows.append(pricing.row(f"{nbytes} B", shape, prior(shape, density), "assumed uniform"))
    return rows


def rows(
    *,
    run: Path | None,
    sizes: Sequence[int] | None,
    ranks: int | None,
    anew: bool,
    pricing: Pricing | None,
    density: float,
    op: CollectiveOp,
) -> list[Row]:
    """The rows for a run (`of_run`) or for bucket sizes (`of_sizes`); exactly one is given.

    Without `pricing` a run's plan is shown as the run wrote it. That is refused with `ranks` or
    `anew` (the user names schemes or bits): they need new prices.

    Raises:
        ConfigError: not exactly one of `run` and `sizes` is given, an argument that it needs is
            missing, or there is no plan.
        ProfileError: a profile in the plan is damaged.
    """
    if (run is None) == (sizes is None):
        raise ConfigError(
            "plan: it is not clear what is to be planned",
            expected="either RUN or --bucket-bytes SIZE,...",
            got="none of them" if run is None else "RUN and --bucket-bytes",
        )
    if pricing is None:
        if run is not None and ranks is None and not anew:
            return list(read_plan(run).values())  # as they were written
        raise ConfigError(
            "plan: --bucket-bytes, --ranks, --schemes or --value-bits needs a cluster to price on",
            expected="--cluster FILE, or the name of a shipped model cluster",
            got="no --cluster",
            remedy="--cluster ethernet_25gbit; `megatron-sparse calibrate` measures one",
        )
    if run is not None:
        return of_run(run, pricing, ranks)
    if ranks is None or sizes is None:
        raise ConfigError(
            "plan: --bucket-bytes needs a number of ranks", expected="--ranks N", got="no --ranks"
        )
    return of_sizes(sizes, pricing, ranks, density, op)


def print_plan(rows: Sequence[dict[str, Any]]) -> None:
    """Prints one table for each set of buckets that are alike; the module describes `rows`.

    Plain text if standard output is not a terminal.
    """
    console = Console(highlight=False)
    # Rows that differ in their bucket and profile only are shown once.
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        shared = {key: value for key, value in row.items() if key not in ("bucket", "profile")}
        groups.setdefault(repr(shared), []).append(row)
    for group in groups.values():
        _print_group(console, group)
    counts = Counter(row["chosen"] for row in rows)
    summary = ", ".join(f"{name} for {count}" for name, count in sorted(counts.items()))
    console.print(f"{len(rows)} buckets: {summary}", markup=False)


def _print_group(console: Console, group: Sequence[dict[str, Any]]) -> None:
    """Prints the buckets' names and shape, the table of prices, and the choice with its reason.

    Rows of a group differ in their bucket and profile only, so the first one speaks for all. The
    table has the cheapest scheme first, and a star at the chosen one.
    """
    row = group[0]
    names = ", ".join(member["bucket"] for member in group[:NAMES_SHOWN])
    more = f" and {len(group) - NAMES_SHOWN} more" if len(group) > NAMES_SHOWN else ""
    console.print(
        f"bucket {names}{more}: {row['numel']} elements, {row['op']} on {row['world_size']} "
        f"ranks, density {row['density']:.3g}",
        style="bold",
        markup=False,
    )
    if prices_us := row["predicted_us"]:
        table = plain_table("", "  scheme", "predicted us", "/ dense")
        for name, price in sorted(prices_us.items(), key=lambda item: item[1]):
            table.add_row(
                f"* {name}" if name == row["chosen"] else f"  {name}",
                f"{price:.1f}",
                f"{price / prices_us[DENSE]:.2f}" if prices_us.get(DENSE) else "-",
                style="bold" if name == row["chosen"] else None,
            )
        console.print(table)
    console.print(f"chosen: {row['chosen']}: {row['reason']}\n", markup=False)
