"""Finds the nodes of a job that are absent, cut off, slow or late, from its links.

Pure functions of numbers. A link is compared with links of its kind only: inside a host, or between
hosts. A rank's score is its *best* link of a kind: where a good rank talks to a bad one the link is
slow as well, but the good rank has others. Slow is who scores `SLOW` times worse than the median
rank; of two there is no telling.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Literal

type Status = Literal["warn", "fail"]

SLOW = 2.0
"""A rank whose best bandwidth is below the median's by this factor is slow, and so is a link."""
SLOW_LATENCY = 3.0
LATENCY_FLOOR_US = 200.0
"""Times vary more than rates do; times below the floor do not matter."""
CLOCK_S = 0.1
"""Clocks that differ by more make logs of several nodes unreadable and confuse leases and files."""


@dataclass(frozen=True)
class RankReport:
    """The measurements of one rank.

    Attributes:
        rank: its number.
        host: the name of its machine.
        latency_us: to each rank that it reached.
        gbit_s: of each link that the backend has measured, in each direction.
        broken: for each rank that it could not reach, the reason.
        offset_s: for each rank that it reached, that rank's clock less its own.
        failure: the reason why the backend was not tried; empty if it was.
    """

    rank: int
    host: str
    latency_us: dict[int, float]
    gbit_s: dict[int, float]
    broken: dict[int, str]
    offset_s: dict[int, float]
    failure: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        status: `fail` where training cannot run, `warn` where it would be slow or confusing.
        who: the host, with the ranks if the finding does not concern all of the host's ranks.
        detail: what was found, with numbers.
        remedy: what to do about it.
    """

    status: Status
    who: str
    detail: str
    remedy: str


def judge(
    reports: Sequence[RankReport], world_size: int, expected_hosts: Sequence[str] = ()
) -> list[Finding]:
    """Everything that is wrong, the worst first.

    Args:
        reports: of the ranks that answered.
        world_size: ranks that were started.
        expected_hosts: the host of each rank, if the launcher tells it.
    """
    found = _absent(reports, world_size, expected_hosts)
    found += _unreachable(reports)
    found += [
        Finding(
            "fail",
            f"rank {report.rank} on {report.host}",
            report.failure,
            "look at cluster.env and the fabric's own tools (ibstat, fi_info, nvidia-smi)",
        )
        for report in reports
        if report.failure
    ]
    found += _slow(reports)
    found += _late_clocks(reports)
    return found


def _absent(
    reports: Sequence[RankReport], world_size: int, expected_hosts: Sequence[str]
) -> list[Finding]:
    there = {report.rank for report in reports}
    missing = [rank for rank in range(world_size) if rank not in there]
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank in missing:
        host = expected_hosts[rank] if rank < len(expected_hosts) else "a host that is not known"
        by_host[host].append(rank)
    return [
        Finding(
            "fail",
            host,
            f"no answer from {_ranks(ranks)}",
            "look at the node, or go around it: sbatch --exclude",
        )
        for host, ranks in by_host.items()
    ]


def _unreachable(reports: Sequence[RankReport]) -> list[Finding]:
    """One line for a rank that most others cannot reach; else one for each broken link."""
    hosts = {report.rank: report.host for report in reports}
    failed: dict[int, dict[int, str]] = defaultdict(dict)
    for report in reports:
        for target, reason in report.broken.items():
            failed[target][report.rank] = reason
    found = []
    for target, reasons in sorted(failed.items()):
        who = f"rank {target} on {hosts.get(target, '?')}"
        others = len(reports) - 1
        if len(reasons) * 2 > others:
            detail = (
                f"{len(reasons)} of {others} ranks cannot reach it: {next(iter(reasons.values()))}"
            )
            found.append(Finding("fail", who, detail, _NETWORK))
            continue
        for source, reason in reasons.items():
            detail = f"rank {source} on {hosts[source]} cannot reach it: {reason}"
            found.append(Finding("fail", who, detail, _NETWORK))
    return found


_NETWORK = (
    "let nodes reach one another on all ports; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in "
    "cluster.env to the interface between them"
)


@dataclass(frozen=True)
class Link:
    """A pair of ranks and the measurements between them; None where nothing was measured.

    Attributes:
        ranks: the lower one first.
        same_host: whether both are on one.
        latency_us: the worse of the two directions.
        gbit_s: the worse of the two ends' readings.
    """

    ranks: tuple[int, int]
    same_host: bool
    latency_us: float | None
    gbit_s: float | None


def links(reports: Sequence[RankReport]) -> list[Link]:
    """Every pair of the ranks that answered."""
    by_rank = {report.rank: report for report in reports}
    found = []
    for a, b in combinations(sorted(by_rank), 2):
        one, other = by_rank[a], by_rank[b]
        latencies = [r.latency_us[to] for r, to in ((one, b), (other, a)) if to in r.latency_us]
        rates = [r.gbit_s[to] for r, to in ((one, b), (other, a)) if to in r.gbit_s]
        found.append(
            Link(
                (a, b),
                one.host == other.host,
                max(latencies, default=None),
                min(rates, default=None),
            )
        )
    return found


def _slow(reports: Sequence[RankReport]) -> list[Finding]:
    hosts = {report.rank: report.host for report in reports}
    found: list[Finding] = []
    for kind, same_host in (("inside its host", True), ("to other hosts", False)):
        ours = [link for link in links(reports) if link.same_host is same_host]
        rates = _scores({link.ranks: link.gbit_s for link in ours}, max)
        slow = _outliers(rates, lambda value, middle: value * SLOW < middle)
        found += _named(slow, rates, hosts, "Gbit/s", f"bandwidth {kind}")
        times = _scores({link.ranks: link.latency_us for link in ours}, min)
        late = _outliers(
            times,
            lambda value, middle: (
                value > SLOW_LATENCY * middle and value > middle + LATENCY_FLOOR_US
            ),
        )
        found += _named(late, times, hosts, "us", f"latency {kind}")
        found += _slow_links(ours, slow, hosts, kind)
    return found


def _scores(
    values: dict[tuple[int, int], float | None], best: Callable[[list[float]], float]
) -> dict[int, float]:
    """Each rank's best link."""
    of_rank: dict[int, list[float]] = defaultdict(list)
    for pair, value in values.items():
        if value is not None:
            for rank in pair:
                of_rank[rank].append(value)
    return {rank: best(found) for rank, found in of_rank.items()}


def _outliers(scores: dict[int, float], is_bad: Callable[[float, float], bool]) -> list[int]:
    if len(scores) < 3:
        return []  # of two ranks, either may be the bad one
    middle = median(scores.values())
    return [rank for rank, score in scores.items() if is_bad(score, middle)]


def _named(
    bad: Iterable[int], scores: dict[int, float], hosts: dict[int, str], unit: str, what: str
) -> list[Finding]:
    """One line for each host, with its ranks if not all of them are bad."""
    middle = median(scores.values()) if scores else 0.0
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank in bad:
        by_host[hosts[rank]].append(rank)
    found = []
    for host, ranks in by_host.items():
        every = [rank for rank, where in hosts.items() if where == host]
        who = host if ranks == every and len(every) < len(hosts) else f"{_ranks(ranks)} on {host}"
        worst = ", ".join(f"{scores[rank]:.3g}" for rank in ranks)
        detail = f"{what}: {worst} {unit} at best, the median rank has {middle:.3g}"
        found.append(Finding("warn", who, detail, _SLOW_REMEDY))
    return found


_SLOW_REMEDY = "look at the node's NIC and at who else is on it, or go around it: sbatch --exclude"


def _slow_links(
    ours: Sequence[Link], slow: Sequence[int], hosts: dict[int, str], kind: str
) -> list[Finding]:
    """Links that are slow though both ends have fast ones."""
    rates = {link.ranks: link.gbit_s for link in ours if link.gbit_s is not None}
    if len(rates) < 3:
        return []
    middle = median(rates.values())
    return [
        Finding(
            "warn",
            f"the link of rank {a} on {hosts[a]} and rank {b} on {hosts[b]}",
            f"bandwidth {kind}: {rate:.3g} Gbit/s, the median link has {middle:.3g}",
            "look at the switches and cables between the two",
        )
        for (a, b), rate in rates.items()
        if rate * SLOW < middle and a not in slow and b not in slow
    ]


def _late_clocks(reports: Sequence[RankReport]) -> list[Finding]:
    """Hosts whose clock is off the median host's, as measured by the first rank that answered."""
    skew = clock_skew(reports)
    hosts = {report.rank: report.host for report in reports}
    found = {}
    for rank, off_s in skew.items():
        if abs(off_s) > CLOCK_S and hosts[rank] not in found:
            found[hosts[rank]] = Finding(
                "warn",
                hosts[rank],
                f"its clock is {off_s:+.3g} s off the median host's",
                "start chrony or ntpd there",
            )
    return list(found.values())


def clock_skew(reports: Sequence[RankReport]) -> dict[int, float]:
    """Seconds from the median clock to each rank's, for ranks that the first rank reached."""
    if not reports:
        return {}
    first = reports[0]
    clocks = {first.rank: 0.0} | first.offset_s
    middle = median(clocks.values())
    return {rank: offset - middle for rank, offset in sorted(clocks.items())}


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
