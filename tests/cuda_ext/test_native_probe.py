"""Kernel arithmetic at indices that no test could allocate a bucket for."""

import subprocess
from pathlib import Path

import pytest
import torch

from megatron_sparse.cuda_ext.sources import SOURCES
from megatron_sparse.cuda_ext.toolchain import find_cxx
from megatron_sparse.reference import prune as prune_oracle
from megatron_sparse.triton_kernels.counter_hash import counter_hash
from tests.codec import pruning_of


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    program = tmp_path_factory.mktemp("probe") / "probe"
    sources = [Path(__file__).with_name("native_probe.cpp"), SOURCES / "kernels_isa.cpp"]
    flags = ["-DMS_ISA=portable", "-DMS_WIDTH=4", "-Wno-psabi", "-fsanitize=undefined"]
    flags += ["-fno-sanitize-recover=all", "-O1", "-std=c++17", "-ffp-contract=off"]
    subprocess.run(
        [find_cxx(), *flags, f"-I{SOURCES}", *map(str, sources), "-o", str(program)], check=True
    )
    done = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    return [line.split() for line in done.stdout.splitlines()]


def test_hashes(lines):
    found = [list(map(int, words)) for kind, *words in lines if kind == "hash"]
    assert len(found) == 72
    for key, draw, index, got in found:
        assert got == int(counter_hash(key, draw, torch.tensor([index])))


def test_sample_positions(lines):
    found = [list(map(int, words)) for kind, *words in lines if kind == "position"]
    assert len(found) == 27
    for n, s, j, random, got in found:
        begin, end = j * n // s, (j + 1) * n // s
        assert got == begin + ((random >> 1) * (end - begin) >> 31)


def test_pruning_beyond_index_2_to_the_32(lines):
    grad = 1 + torch.arange(40, dtype=torch.float32) * torch.tensor(0.001)
    grad[1::2] = 1.02
    pruning = pruning_of(torch.zeros(40), 1.02, key=9, chance=0.5)
    expected = prune_oracle.prune(grad, pruning, 1, 5 * 2**32 + 3)
    found = [list(map(float, words)) for kind, *words in lines if kind == "prune"]
    assert torch.tensor([row[1] for row in found]).equal(expected[0])
    assert torch.tensor([row[2] for row in found]).equal(expected[1])
    assert 0 < int((expected[0][1::2] != 0).sum()) < 20
