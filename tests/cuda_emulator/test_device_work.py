"""Launches and bytes of a bucket, as `docs/device-work.md` states them."""

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp
from tests.cuda_emulator.compilation import find_gxx
from tests.cuda_emulator.device import EmulatedGpu, to_gpu
from tests.cuda_emulator.device_work import (
    FLOOR_BYTES,
    MOVES_NUMEL,
    NUMEL,
    PAGE,
    RANKS,
    RICE_NUMEL,
    Counts,
    everything,
    page,
)
from tests.cuda_emulator.emulator import COO, Emulator
from tests.cuda_emulator.ledger import Ledger, counting


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Counts:
    if find_gxx() is None:
        pytest.skip("the emulator needs g++")
    with pytest.MonkeyPatch.context() as patch:
        return everything(tmp_path_factory.mktemp("counting"), patch)


def test_the_page_says_what_the_emulator_counts(counts: Counts) -> None:
    """`python -m tests.cuda_emulator.device_work` writes it anew."""
    assert PAGE.read_text("utf-8") == page(counts)


def test_rice_records_take_one_launch_more(counts: Counts) -> None:
    """And little more memory traffic than COO's: gradient and residual are read once.

    Without indices one launch follows the cut, and nothing is staged.
    """
    encodings = counts.encodings
    coo = encodings["COO, fp32, 1 %"]
    for name, ledger in encodings.items():
        whole = name.endswith("every element")
        assert ledger.kernels == (2 if whole else 3 if ledger is coo else 4), name
        assert ledger.memsets == 0, name
        if whole:
            assert ledger.bytes_read + ledger.bytes_written <= 13 * RICE_NUMEL
    rice = encodings["Rice, fp32, 1 %"]
    assert rice.bytes_read + rice.bytes_written <= 1.05 * (coo.bytes_read + coo.bytes_written)


def test_moves_are_read_and_written_about_once(counts: Counts) -> None:
    """Of bf16: two numbers in, or one in and one out, and at most half a number of record."""
    encoding, decoding, gathered = counts.moves.values()
    counted = 2 * 2 + 1  # symbols; and chunks are moved
    assert encoding.bytes_read <= (2 * 2 + 1 + counted) * MOVES_NUMEL
    assert encoding.bytes_written <= MOVES_NUMEL
    aside = 2 * MOVES_NUMEL  # what was decoded is copied
    table = 73 * 2**10
    assert decoding.bytes_read <= (2 + 1.5) * MOVES_NUMEL + aside + table
    assert decoding.bytes_written <= (2 + 0.1) * MOVES_NUMEL + aside + table
    assert (gathered.kernels, gathered.memsets) == (3, 1), "of all records"
    assert gathered.bytes_read + gathered.bytes_written <= (RANKS - 1) * (
        decoding.bytes_read + decoding.bytes_written
    )


def test_no_way_counts_fewer_bytes_than_the_floor(counts: Counts) -> None:
    """Gradient and residual are read; the residual is written, and the sum or a shard of it."""
    for way, ledger in counts.ways.items():
        whole = way.op is CollectiveOp.ALL_REDUCE
        least = FLOOR_BYTES * NUMEL if whole else (FLOOR_BYTES - 4) * NUMEL
        assert ledger.bytes_read + ledger.bytes_written >= least, way


def work_of_a_threshold(emulator: Emulator, numel: int, samples: int) -> Ledger:
    """The work for one range's threshold, without a residual."""
    with counting(ledger := Ledger()):
        emulator.call(
            "sample_threshold",
            to_gpu(torch.randn(numel)),
            None,
            to_gpu(torch.tensor([0, numel])),
            to_gpu(torch.tensor([0.1])),
            samples,
            to_gpu(torch.tensor([3])),
        )
    return ledger


def test_a_kernel_counts_each_sector_of_its_buffers_once(counts: Counts) -> None:
    """Of 4096 samples of 4096 elements: all are read and their magnitudes written, once each."""
    numel, tables = 4096, 2 * 5 * 32  # of each of the two launches
    ledger = work_of_a_threshold(counts.emulator, numel, samples=numel)
    assert ledger.kernels >= 1
    assert ledger.torch_ops == 0
    assert 0 <= ledger.bytes_written - 4 * numel <= tables
    assert 0 <= ledger.bytes_read - 8 * numel <= tables, "gradient, and magnitudes"


def test_the_samples_of_one_range_are_gathered_by_many_blocks(counts: Counts) -> None:
    numel, samples, threads = 20_000, 4000, 256
    ledger = work_of_a_threshold(counts.emulator, numel, samples)
    assert ledger.kernels == 2, "gather, select"
    assert ledger.blocks == -(-samples // threads) + 1, "a thread a sample, and one block a range"


@pytest.mark.parametrize("limits", [False, True])
def test_an_encoder_is_three_launches_and_a_fourth_for_limits(counts: Counts, limits: bool) -> None:
    """Cut, compact, place; nothing else clears slots or plans the records."""
    numel = 2 * 4096
    whole, slots = to_gpu(torch.tensor([0, numel])), to_gpu(torch.tensor([0, 4 * numel]))
    kinds = to_gpu(torch.tensor([COO], dtype=torch.uint8))
    out, grad = to_gpu(torch.empty(4 * numel, dtype=torch.uint8)), to_gpu(torch.randn(numel))
    records = (whole, kinds, 0, 0, 0, 0, False, out, slots)
    with counting(ledger := Ledger()):
        if limits:
            limit, most = to_gpu(torch.tensor([2.0])), to_gpu(torch.tensor([300]))
            pruning = (to_gpu(torch.zeros(numel)), whole, limit, None, 1.0, -1, most)
            counts.emulator.call("prune_encode", grad, *records, *pruning)
        else:
            counts.emulator.call("encode", grad, *records)
    assert (ledger.kernels, ledger.memsets) == (4 if limits else 3, 0)


def test_torchs_operations_count_what_they_read_and_write() -> None:
    with EmulatedGpu(), counting(ledger := Ledger()):
        x = to_gpu(torch.ones(100))
        before = (ledger.torch_ops, ledger.bytes_read, ledger.bytes_written)
        assert before == (0, 0, 0)
        x[:50].add_(x[50:])
        assert (ledger.torch_ops, ledger.bytes_read, ledger.bytes_written) == (1, 400, 200)
        torch.empty(1000, device="cuda").view(10, 100)
        assert ledger.torch_ops == 1, "allocations and views are free"
        x.zero_()
        assert (ledger.torch_ops, ledger.bytes_read, ledger.bytes_written) == (2, 400, 600)
    x.inner.add_(1)
    assert ledger.torch_ops == 2, "nothing is counted outside"
