"""Launches and bytes of a bucket, as `docs/device-work.md` states them."""

import re

import pytest
import torch

from megatron_sparse.cuda_ext.toolchain import find_cuda
from megatron_sparse.errors import DependencyError
from tests.cuda_emulator import instructions
from tests.cuda_emulator.compilation import find_gxx
from tests.cuda_emulator.device import EmulatedGpu, to_gpu
from tests.cuda_emulator.device_work import PAGE, Counts, everything, page
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
    assert PAGE.read_text("utf-8").split(instructions.HEAD)[0] == page(counts)


def test_the_page_says_how_many_instructions_a_tile_takes() -> None:
    """Within 5 %: another nvcc makes other machine code."""
    try:
        instructions.tool("nvdisasm")
        find_cuda()
    except DependencyError as error:
        pytest.skip(str(error))
    rows = PAGE.read_text("utf-8").split(instructions.HEAD)[1]
    stated = {
        name: int(n.replace(",", "")) for name, n in re.findall(r"\| (.*?) \| ([\d,]+) \|", rows)
    }
    assert stated == pytest.approx(instructions.counts(), rel=0.05)


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
