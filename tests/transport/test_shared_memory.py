"""Messages and sums through shared memory, beside gloo's, between real processes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_sparse.collectives import SCHEMES
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.cuda_ext.shared_memory import SUM_DTYPES
from megatron_sparse.errors import CommunicationError, ConfigError, DependencyError
from megatron_sparse.transport import ProcessGroupTransport, opening, process_group
from megatron_sparse.transport.shared_memory import SharedMemoryTransport, segment
from tests.collectives.fault_ranks import one_after_another
from tests.collectives.faults import Fault
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("forked_ranks")

CPU = torch.device("cpu")
SLOT = segment.MOST_SLOT_BYTES
WINDOW = SLOT * segment.SLOTS


def _shared(timeout_s=110, **options):
    shared = SharedMemoryTransport(dist.group.WORLD, timeout_s, **options)
    assert shared.shares_memory, shared.refusals
    return shared


def _values(numel, rank, dtype):
    """Small integers, different on each rank: their sums are exact in every dtype."""
    return ((torch.arange(numel) * (rank + 3) + rank) % 13).to(dtype)


def _collectives(rank, world_size):
    """Sums, shards and gathers, bit for bit as gloo's, where sums are exact."""
    shared, gloo = _shared(), ProcessGroupTransport(dist.group.WORLD, 60, CPU)
    for dtype in SUM_DTYPES:
        beyond = 2 * WINDOW // dtype.itemsize + 7 if dtype in (torch.float32, torch.int8) else 33
        for numel in (0, 1, 3, 1001, beyond):
            own = _values(numel, rank, dtype)
            ours, theirs = own.clone(), own.clone()
            shared.all_reduce_(ours).finish()
            gloo.all_reduce_(theirs).finish()
            assert torch.equal(ours, theirs), (dtype, numel)
            whole = _values(numel * world_size, rank, dtype)
            kept = whole.clone()
            ours, theirs = torch.full_like(own, 77), torch.full_like(own, 77)
            shared.reduce_scatter(ours, whole).finish()
            if numel:
                gloo.reduce_scatter(theirs, whole).finish()
            assert torch.equal(ours, theirs), (dtype, numel)
            assert torch.equal(whole, kept), "the input stays as it is"
            view = whole[rank * numel : (rank + 1) * numel]
            shared.reduce_scatter(view, whole).finish()
            kept[rank * numel : (rank + 1) * numel] = theirs
            assert torch.equal(whole, kept), "only the shard changes"
            gathered = own.new_full((numel * world_size,), 77)
            shared.all_gather(gathered, own).finish()
            expected = torch.cat([_values(numel, each, dtype) for each in range(world_size)])
            assert torch.equal(gathered, expected)
            place = gathered.fill_(77)[rank * numel : (rank + 1) * numel]
            shared.all_gather(gathered, place.copy_(own)).finish()
            assert torch.equal(gathered, expected), "in place"
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        whole, shard = (_values(5 * n, rank, dtype) for n in (world_size, 1))
        if dtype.is_floating_point:
            shared.reduce_scatter(shard, whole, average=True).finish()
            parts = [_values(5 * world_size, each, torch.float32) for each in range(world_size)]
            expected = torch.stack(parts).sum(0).chunk(world_size)[rank] / world_size
            assert torch.equal(shard, expected.to(dtype))
    shared.close()
    gloo.close()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_and_gathers_are_gloos(world_size):
    run_ranks(_collectives, world_size)


def _normal(numel, rank, dtype):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
    values[:4] = torch.tensor([float("inf"), -0.0, 1e-40, 6e4])
    return values


def _rank_order(rank, world_size, dtype):
    shared = _shared()
    numel = 3 * SLOT // dtype.itemsize * world_size
    sums = []
    for _ in range(2):
        values = _normal(numel, rank, dtype)
        shared.all_reduce_(values).finish()
        sums.append(values)
    shared.close()
    parts = [_normal(numel, each, dtype).float() for each in range(world_size)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    expected = expected.to(dtype)
    raw = torch.int32 if dtype is torch.float32 else torch.int16
    return [torch.equal(each.view(raw), expected.view(raw)) for each in sums]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_in_rank_order_and_rounded_once(dtype):
    assert run_ranks(_rank_order, 3, dtype) == [[True, True]] * 3


def _exchanges(rank, world_size):
    """Every size and dtype, to all at once; then many under way, posted in different orders."""
    shared = _shared()
    peers = [peer for peer in range(world_size) if peer != rank]

    def message(source, target, size, dtype=torch.uint8):
        return ((torch.arange(size) + 31 * source + target) % 100).to(dtype)

    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
        for size in (0, 1, 4099, WINDOW // dtype.itemsize + 1):
            sends = [(peer, message(rank, peer, size, dtype)) for peer in peers]
            receives = [(peer, torch.zeros(size, dtype=dtype)) for peer in peers]
            shared.exchange(sends, receives, tag=7).finish()
            for peer, values in receives:
                assert torch.equal(values, message(peer, rank, size, dtype))
    # More than the window and more than the grants, with collectives in between.
    order = torch.randperm(270, generator=torch.Generator().manual_seed(rank)).tolist()
    works, arrived, summed = [], {}, []
    for place, tag in enumerate(order):
        size = 9_000 + 7 * tag
        receives = [(peer, torch.zeros(size, dtype=torch.uint8)) for peer in peers]
        sends = [(peer, message(rank + tag, peer, size)) for peer in peers]
        works.append(shared.exchange(sends, receives, tag))
        arrived[tag] = receives
        if place % 50 == 0:
            summed.append(torch.full((70_001,), float(rank + place)))
            works.append(shared.all_reduce_(summed[-1]))
    for work in reversed(works):
        work.finish()
    for tag, receives in arrived.items():
        for peer, values in receives:
            assert torch.equal(values, message(peer + tag, rank, values.numel())), tag
    for number, values in enumerate(summed):
        assert (values == sum(range(world_size)) + 50 * number * world_size).all()
    # The same tag: in the order of the posts.
    target, source = (rank + 1) % world_size, (rank - 1) % world_size
    got = [torch.zeros(3) for _ in range(4)]
    works = [
        shared.exchange([(target, torch.full((3,), float(i)))], [(source, got[i])], tag=1)
        for i in range(4)
    ]
    for work in works:
        work.finish()
    assert [each[0].item() for each in got] == [0, 1, 2, 3]
    shared.close()


@pytest.mark.parametrize("world_size", [2, 4])
def test_exchanges_move_the_given_tensors(world_size):
    run_ranks(_exchanges, world_size)


def _waits_for_a_late_sum(rank, world_size):
    """Rank 2 posts a sum only when rank 0's later message has come: neither blocks the other."""
    shared = _shared()
    values, message = torch.ones(WINDOW), torch.full((2 * WINDOW,), float(rank))
    works = []
    if rank < 2:
        works = [shared.all_reduce_(values), shared.all_reduce_(torch.ones(WINDOW))]
    if rank == 0:
        works.append(shared.exchange([(1, message), (2, message)], [], 5))
    else:
        shared.exchange([], [(0, message)], 5).finish()
        assert (message == 0).all()
    if rank == 2:
        works = [shared.all_reduce_(values), shared.all_reduce_(torch.ones(WINDOW))]
    for work in works:
        work.finish()
    assert (values == world_size).all()
    shared.close()


def test_a_sum_that_waits_for_a_rank_holds_up_no_message():
    run_ranks(_waits_for_a_late_sum, 3)


def _misfit(rank, world_size):
    shared = _shared()
    sends, receives = [(1, torch.zeros(10))], [(0, torch.zeros(9))]
    work = shared.exchange(*((sends, []) if rank == 0 else ([], receives)), tag=0)
    with pytest.raises(CommunicationError) as caught:
        work.finish()
    shared.close(broken=True)
    return str(caught.value)


def test_a_message_that_does_not_fit_is_an_error_on_both_sides():
    texts = run_ranks(_misfit, 2)
    for rank, text in enumerate(texts):
        assert f"exchange with ranks [{1 - rank}] failed" in text
        assert "36 bytes" in text
        assert "40 bytes" in text


def test_every_scheme_sums_through_shared_memory():
    cases = [(name, Fault("none", 0, 0)) for name in SCHEMES]
    for results in run_ranks(one_after_another, 3, cases, 30.0, "shared_memory"):
        for (name, _), result in zip(cases, results, strict=True):
            assert result["right"], (name, result["text"])


def _fault(rank, world_size, fault, timeout_s, folder):
    shared = _shared(timeout_s, liveness=fault == "killed")
    shared.all_reduce_(torch.ones(10)).finish()
    if rank == world_size - 1:
        time.sleep(0.5)
        # Stopped in the middle of the others' operations.
        os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    works = [
        lambda: shared.all_reduce_(torch.ones(WINDOW)),
        lambda: shared.exchange([(world_size - 1, torch.ones(4 * WINDOW))], [], 3),
    ]
    start_s = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        works[rank]().finish()
    answer = {"text": str(caught.value), "seconds": time.monotonic() - start_s}
    shared.close(broken=True)
    answer["left"] = _left_after_close()
    Path(folder, str(rank)).write_text(json.dumps(answer))


def _left_after_close():
    """Mappings and descriptors of shared memory; the engine's thread frees them soon after."""
    deadline_s = time.monotonic() + 10
    while (left := _open_memory()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def _open_memory():
    maps = Path("/proc/self/maps").read_text().splitlines()
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [line for line in [*maps, *map(str, links)] if "memfd:megatron_sparse" in line]


@pytest.mark.parametrize(("fault", "timeout_s", "most_s"), [("killed", 60, 15), ("hung", 3, 10)])
def test_a_lost_rank_is_an_error_within_the_deadline(fault, timeout_s, most_s, tmp_path):
    with pytest.raises(AssertionError, match=r"no answer from ranks"):
        run_ranks(_fault, 3, fault, timeout_s, str(tmp_path), timeout_s=30.0, linger_s=10.0)
    for rank, name in enumerate(("all_reduce", "exchange with ranks [2]")):
        answer = json.loads((tmp_path / str(rank)).read_text())
        assert f"{name} failed" in answer["text"]
        assert answer["seconds"] < most_s
        assert answer["left"] == []
        if fault == "killed":
            assert "rank 2 has died" in answer["text"]
    assert not [name for name in os.listdir("/dev/shm") if "megatron_sparse" in name]
    assert "megatron_sparse-" not in Path("/proc/net/unix").read_text()


def _on_hosts(rank, world_size, hosts):
    """Ranks that say that they are on these hosts."""
    process_group.socket.gethostname = lambda: f"host{hosts[rank]}"
    mixed = SharedMemoryTransport(dist.group.WORLD, 30)
    peers = [peer for peer in range(world_size) if peer != rank]
    posted = []
    mixed._under_way.post, post = (
        lambda name, *rest: posted.append(name) or post(name, *rest),
        mixed._under_way.post,
    )
    receives = [(peer, torch.zeros(1000 + rank)) for peer in peers]
    sends = [(peer, torch.full((1000 + peer,), 10.0 * rank + peer)) for peer in peers]
    work = mixed.exchange(sends, receives, tag=2)
    work.when_ready(lambda: None)
    while not work.ready():
        time.sleep(0.001)
    work.finish()
    for peer, values in receives:
        assert (values == 10.0 * peer + rank).all()
    summed, shard = torch.ones(8), torch.zeros(2)
    mixed.all_reduce_(summed).finish()
    mixed.reduce_scatter(shard, summed).finish()
    gathered = torch.zeros(4)
    mixed.all_gather(gathered, torch.tensor([float(rank)])).finish()
    assert (summed == 4).all()
    assert (shard == 16).all()
    assert gathered.tolist() == [0, 1, 2, 3]
    mixed.close()
    return mixed.nodes, posted


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 1, 0)])
def test_messages_between_hosts_go_over_gloo(hosts):
    for rank, (nodes, posted) in enumerate(run_ranks(_on_hosts, 4, hosts)):
        near = [each for each in range(4) if hosts[each] == hosts[rank] and each != rank]
        assert posted == [f"exchange with ranks {near}"], "and the collectives over gloo"
        assert [nodes[each] == nodes[rank] for each in near] == [True]


def _without_memory(rank, world_size, failing):
    def fail(*_):
        raise OSError(28, "No space left on device")

    if failing == "segment":
        segment.os.posix_fallocate = fail
    elif failing == "mapping" and rank == 1:
        segment.Engine = fail
    elif failing == "library" and rank == 1:
        segment.segment_bytes = lambda _: (_ for _ in ()).throw(DependencyError("no compiler"))
    logged = []
    opening.logger.log = lambda _, text: logged.append(text)
    chosen = opening.open_transport(dist.group.WORLD, SchemeConfig(timeout_s=30), CPU)
    assert not chosen.shares_memory
    values = torch.ones(3)
    chosen.all_reduce_(values).finish()
    assert (values == world_size).all()
    chosen.close()
    with pytest.raises(ConfigError) as caught:
        opening.open_transport(
            dist.group.WORLD, SchemeConfig(timeout_s=30, intra_node="shared_memory"), CPU
        )
    return logged, str(caught.value), _left_after_close()


@pytest.mark.parametrize(
    ("failing", "culprit", "reason"),
    [
        ("segment", 0, "No space left"),
        ("mapping", 1, "No space left"),
        ("library", 1, "no compiler"),
    ],
)
def test_memory_that_cannot_be_shared_is_told(failing, culprit, reason):
    for rank, (logged, refused, left) in enumerate(run_ranks(_without_memory, 3, failing)):
        assert left == []
        assert f"rank {culprit}: " in refused
        assert reason in refused
        assert len(logged) == (rank == 0), "the first rank says so, once"
        assert all(reason in text for text in logged)


def _sums_by_default(rank, world_size):
    names = []
    for intra_node in ("auto", "shared_memory"):
        scheme = SchemeConfig(intra_node=intra_node, timeout_s=60)
        made, gloo = (
            opening.open_transport(dist.group.WORLD, each, CPU)
            for each in (scheme, SchemeConfig(intra_node="backend", timeout_s=60))
        )
        post = made._under_way.post
        made._under_way.post = lambda name, *rest, post=post: (
            names.append(name) or post(name, *rest)
        )
        ours, theirs = (_normal(1001, rank, torch.float32) for _ in range(2))
        made.all_reduce_(ours).finish()
        gloo.all_reduce_(theirs).finish()
        if intra_node == "auto":
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
        made.close()
        gloo.close()
    return names


def test_by_default_sums_have_the_backends_bits():
    assert run_ranks(_sums_by_default, 2) == [["all_reduce"] * 2] * 2
    assert run_ranks(_sums_by_default, 3) == [["all_reduce"]] * 3


def _chosen(rank, world_size):
    kinds = []
    for intra_node in ("auto", "shared_memory", "backend"):
        made = opening.open_transport(
            dist.group.WORLD, SchemeConfig(intra_node=intra_node, timeout_s=30), CPU
        )
        kinds.append(getattr(made, "shares_memory", False))
        made.close()
    return kinds, _left_after_close()


def test_the_configuration_chooses():
    assert run_ranks(_chosen, 2) == [([True, True, False], [])] * 2
    with pytest.raises(ConfigError, match="is for gradients in host memory"):
        opening.open_transport(
            None,
            SchemeConfig(intra_node="shared_memory"),
            torch.device("cuda"),
        )
    with pytest.raises(ConfigError, match=r"scheme\.intra_node is unknown"):
        SchemeConfig(intra_node="shm")
