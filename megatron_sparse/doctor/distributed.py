"""`megatron-sparse doctor --distributed`: whether the nodes of a job are fit for it.

Every rank tells where it is, pings every other, and then exchanges messages with every other over
the backend of training. Ranks answer to rank 0 through torch's store, as JSON, so that nothing that
is broken between two others keeps an answer back; rank 0 judges (`doctor_verdict`) and prints.
All operations have deadlines. Ranks are those of srun or torchrun, or processes of this machine.

With GPUs the backend is NCCL; that has not been run.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.markup import escape

from megatron_sparse.config.checks import in_range
from megatron_sparse.doctor.printing import console, table
from megatron_sparse.doctor.verdict import Finding, RankReport, clock_skew, judge, links
from megatron_sparse.errors import CommunicationError, ConfigError, MegatronSparseError
from megatron_sparse.run import local_ranks, slurm
from megatron_sparse.run.json_lines import write_rows

MATRIX_RANKS = 16
"""The most ranks whose links are printed one by one; `--json` has them all."""
KEEP_ALIVE_S = 10.0
"""How long rank 0, which may hold the store, waits for the others to read the verdict."""
HARD_LIMIT = 4.0
"""The watchdog ends the process after this many timeouts; three waits take up to one each."""
_STYLE = {"warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Request:
    """The command's options.

    Attributes:
        ranks: processes to start on this machine; None takes those of a local_ranks.
        cluster: a file of `configs/cluster`, whose environment the ranks get; None sets none.
        timeout_s: seconds that each of the waits may take: for the ranks to meet, for their
            answers, and for an exchange over the backend.
        strict: findings that are warnings count as failures.
        json: file for one JSON object a line; None writes none.
    """

    ranks: int | None
    cluster: str | None
    timeout_s: float
    strict: bool
    json: Path | None

    def __post_init__(self) -> None:
        in_range("--timeout", self.timeout_s, 1, 86_400)

    def arguments(self) -> list[str]:
        """The command line that runs one rank with the same options."""
        flags = ["--strict"] if self.strict else []
        flags += [] if self.cluster is None else [f"--cluster={self.cluster}"]
        flags += [] if self.json is None else [f"--json={self.json}"]
        return ["--distributed", f"--timeout={self.timeout_s:g}", *flags]


def run(request: Request) -> int:
    """Starts the ranks that are missing, or does one rank's part.

    Returns:
        The exit code: 0, or 1 when something failed (or was found at all, with `strict`).

    Raises:
        CommunicationError: rank 0 cannot be reached, or it ran out of time.
        ConfigError: there are no ranks, or the flags do not fit.
    """
    os.environ.update(slurm.ranks(os.environ))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        world_size = int(os.environ["WORLD_SIZE"])
        if request.ranks not in (None, world_size):
            raise ConfigError(
                "--ranks is not the number of ranks that were started",
                expected=world_size,
                got=request.ranks,
                remedy="leave out --ranks",
            )
        return run_rank(request, int(os.environ["RANK"]), world_size)
    if request.ranks is None or request.ranks < 2:
        raise ConfigError(
            "the job has only one rank",
            expected="at least 2 ranks, started by srun or torchrun, or --ranks N on this machine",
            got="one process" if request.ranks is None else f"--ranks {request.ranks}",
            remedy="put srun before the command, or add --ranks 4",
        )
    command = local_ranks.command_line(["doctor", *request.arguments()])
    return local_ranks.run_loopback(command, request.ranks)


def run_rank(request: Request, rank: int, world_size: int) -> int:
    """One rank's part, where MASTER_ADDR and MASTER_PORT are set.

    Returns:
        The exit code, the same on every rank.

    Raises:
        CommunicationError: rank 0 cannot be reached, or it ran out of time.
        ConfigError: the cluster is unknown, or the report cannot be written.
    """
    if request.cluster is not None:
        from megatron_sparse.run.composition import compose

        for name, value in compose([f"cluster={request.cluster}"]).cluster.env.items():
            os.environ.setdefault(name, value)
    # The import takes seconds, many on a busy machine; they must not count against a rank.
    import_module("torch.distributed")
    watchdog = _start_watchdog(request.timeout_s, rank)
    try:
        store = _open_store(rank, world_size, request.timeout_s)
        return _examine(request, store, rank, world_size)
    finally:
        watchdog.cancel()


def _start_watchdog(timeout_s: float, rank: int) -> threading.Timer:
    """Ends this process if it hangs where it should not be able to."""

    def give_up() -> None:
        error = _out_of_time(rank, HARD_LIMIT * timeout_s)
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)

    timer = threading.Timer(HARD_LIMIT * timeout_s, give_up)
    timer.daemon = True
    timer.start()
    return timer


def _out_of_time(rank: int, seconds: float) -> CommunicationError:
    return CommunicationError(
        f"doctor: rank {rank} on {socket.gethostname()} did not come to an end",
        expected=f"an end within {seconds:g} s",
        got="none",
        remedy="look at rank 0's lines; set --timeout higher where the machine is slow",
    )


def _open_store(rank: int, world_size: int, timeout_s: float) -> Any:
    """The store for the ranks' answers; rank 0 hosts it, or torchrun's agent beside rank 0.

    Raises:
        CommunicationError: it cannot be reached.
    """
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - documented there
            host,
            port,
            world_size,
            rank == 0 and not of_agent,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError) as error:
        raise CommunicationError(
            f"doctor: rank {rank} on {socket.gethostname()} cannot reach rank 0",
            expected=f"an answer at MASTER_ADDR={host}, MASTER_PORT={port} within {timeout_s:g} s",
            got=str(error).splitlines()[0],
            remedy="look at the first node: is rank 0 there, and is the port open?",
        ) from None
    # The agent's store outlives restarts of its ranks, so each start needs its own prefix.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _prefixed(f"megatron_sparse/doctor/{start}", store)


def _prefixed(prefix: str, store: Any) -> Any:
    import torch.distributed as dist

    return dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]


def _examine(request: Request, store: Any, rank: int, world_size: int) -> int:
    import torch

    from megatron_sparse.doctor.link_probe import Answerer, Invitation, ping

    torch.set_num_threads(1)
    with Answerer() as answerer:
        here = {**asdict(answerer.invitation), "host": socket.gethostname()}
        store.set(f"here/{rank}", json.dumps(here))
        there = _meet(store, rank, world_size, request.timeout_s)
        pings = {
            peer: ping(Invitation(tuple(invitation["hosts"]), invitation["port"]))
            # Each rank begins with the next one, so that all ranks do not ping one rank at once.
            for peer, invitation in sorted(
                there.items(), key=lambda item: (item[0] - rank) % world_size
            )
            if peer != rank
        }
        reached = {peer: found for peer, found in pings.items() if found.latency_us is not None}
        broken = {peer: found.error for peer, found in pings.items() if found.latency_us is None}
        store.set(f"reached/{rank}", str(len(reached)))
        answers = _collect(store, "reached", there, request.timeout_s)
        # A backend with one broken link hangs as a whole.
        all_reached = [int(answer) for answer in answers.values()] == [world_size - 1] * world_size
        rates, failure = _try_backend(store, rank, world_size, request) if all_reached else ({}, "")
        report = RankReport(
            rank,
            here["host"],
            {peer: found.latency_us or 0.0 for peer, found in reached.items()},
            rates,
            broken,
            {peer: found.offset_s for peer, found in reached.items()},
            failure,
        )
        store.set(f"report/{rank}", json.dumps(asdict(report)))
        if rank == 0:
            return _conclude(request, store, there, world_size)
        try:
            store.wait(["verdict"], timedelta(seconds=2 * request.timeout_s))
            code = int(store.get("verdict"))
            store.add("read", 1)
        except RuntimeError:
            raise _out_of_time(rank, 2 * request.timeout_s) from None
        return code


def _meet(store: Any, rank: int, world_size: int, timeout_s: float) -> dict[int, dict[str, Any]]:
    """The ranks that came in time, the same on every rank: rank 0 decides."""
    if rank == 0:
        came = _collect(store, "here", range(world_size), timeout_s)
        store.set("there", json.dumps({peer: json.loads(text) for peer, text in came.items()}))
    try:
        # Rank 0 may have begun to wait later than this one.
        store.wait(["there"], timedelta(seconds=2 * timeout_s))
    except RuntimeError:
        raise _out_of_time(rank, 2 * timeout_s) from None
    there = json.loads(store.get("there"))
    if str(rank) not in there:
        raise CommunicationError(
            f"doctor: rank {rank} on {socket.gethostname()} came too late",
            expected=f"all ranks within {timeout_s:g} s of rank 0",
            got="later",
            remedy="set --timeout higher, or look at what keeps this node",
        )
    return {int(peer): invitation for peer, invitation in there.items()}


def _collect(store: Any, what: str, ranks: Any, timeout_s: float) -> dict[int, bytes]:
    """The answers that arrive in time."""
    deadline_s, found = time.monotonic() + timeout_s, {}
    for rank in ranks:
        left_s = max(deadline_s - time.monotonic(), 0.01)
        try:
            store.wait([f"{what}/{rank}"], timedelta(seconds=left_s))
            found[rank] = store.get(f"{what}/{rank}")
        except RuntimeError:
            continue  # late or gone: the caller sees that the rank is missing
    return found


def _try_backend(
    store: Any, rank: int, world_size: int, request: Request
) -> tuple[dict[int, float], str]:
    """The rates of the backend's links, or the reason why there are none."""
    import torch
    import torch.distributed as dist

    from megatron_sparse.doctor.link_probe import exchange_rates

    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        backend, device = "nccl", torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        # With it a rank that does not answer raises an exception instead of ending this process.
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        dist.init_process_group(
            backend,
            store=_prefixed("backend", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=request.timeout_s),
        )
        rates = exchange_rates(rank, world_size, device)
        dist.destroy_process_group()
    except (dist.DistError, RuntimeError, ValueError) as error:
        return {}, f"{backend}: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return rates, ""


def _conclude(request: Request, store: Any, there: Mapping[int, Any], world_size: int) -> int:
    """Rank 0's part: judges, prints, writes, and tells the others."""
    code = ConfigError.exit_code
    try:
        texts = _collect(store, "report", there, request.timeout_s)
        reports = [_parse(text) for text in texts.values()]
        findings = judge(reports, world_size, _expected_hosts())
        _print(reports, findings, world_size)
        if request.json is not None:
            write_rows(request.json, json_rows(reports, findings))
        failed = any(finding.status == "fail" or request.strict for finding in findings)
        code = 1 if failed else 0
    except MegatronSparseError as error:
        code = error.exit_code
        raise
    finally:
        store.set("verdict", str(code))
        deadline_s = time.monotonic() + KEEP_ALIVE_S
        while store.add("read", 0) < len(there) - 1 and time.monotonic() < deadline_s:
            time.sleep(0.02)
    return code


def _expected_hosts() -> list[str]:
    """The host of each rank under Slurm; empty under other launchers, which do not name it."""
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        return []  # torchrun's ranks are not Slurm's tasks
    return slurm.host_of_each_rank(os.environ)


def _parse(text: bytes) -> RankReport:
    fields = json.loads(text)
    for name in ("latency_us", "gbit_s", "broken", "offset_s"):
        fields[name] = {int(peer): value for peer, value in fields[name].items()}
    return RankReport(**fields)


def json_rows(reports: Sequence[RankReport], findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """One object for each rank, link and finding; `kind` tells them apart."""
    skew = clock_skew(reports)
    rows: list[dict[str, Any]] = [
        {
            "kind": "rank",
            "rank": r.rank,
            "host": r.host,
            "clock_skew_s": skew.get(r.rank),
            "unreachable": r.broken,
        }
        for r in reports
    ]
    rows += [{"kind": "link", **asdict(link)} for link in links(reports)]
    return rows + [{"kind": "finding", **asdict(finding)} for finding in findings]


def _print(reports: Sequence[RankReport], findings: Sequence[Finding], world_size: int) -> None:
    out, skew = console(), clock_skew(reports)
    found = {link.ranks: link for link in links(reports)}
    one_by_one = len(reports) <= MATRIX_RANKS
    columns = [f"to {r.rank}" for r in reports] if one_by_one else ["median link", "worst link"]
    title = f"megatron_sparse doctor: {len(reports)} of {world_size} ranks"
    shown = table(title, "rank", "host", "clock ms", *columns)
    for report in reports:
        ours = [found.get((min(report.rank, r.rank), max(report.rank, r.rank))) for r in reports]
        cells = [_cell(link) for link in ours]
        if not one_by_one:
            ordered = sorted(
                (link for link in ours if link), key=lambda link: -(link.gbit_s or 0.0)
            )
            cells = [_cell(ordered[len(ordered) // 2]), _cell(ordered[-1])]
        clock = f"{skew[report.rank] * 1e3:+.2f}" if report.rank in skew else "?"
        shown.add_row(str(report.rank), escape(report.host), clock, *cells)
    out.print(shown)
    out.print("links: latency in us over TCP / Gbit/s in each direction over the backend")
    for finding in findings:
        style = _STYLE[finding.status]
        out.print(f"[{style}]{finding.status}[/] {escape(finding.who)}: {escape(finding.detail)}")
        out.print(f"     {escape(finding.remedy)}")
    if not findings:
        out.print("every rank sees every other")


def _cell(link: Any) -> str:
    if link is None:
        return ""
    latency = "-" if link.latency_us is None else f"{link.latency_us:.0f}"
    rate = "-" if link.gbit_s is None else f"{link.gbit_s:.3g}"
    return f"{latency} / {rate}"
