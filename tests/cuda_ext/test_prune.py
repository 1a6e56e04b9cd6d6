"""`prune_` equals its oracle bit for bit: on every instruction set of this CPU, and on a GPU."""

import math
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.errors import ExtensionError
from megatron_sparse.formats.moves import encode_moves
from megatron_sparse.reference import prune as oracle
from tests.codec import KEY, on_threads, one_nan, pruning_of
from tests.cuda_ext import cases
from tests.cuda_ext.cases import BAD_SELECTIONS

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def check(grad, pruning, wire, what, device="cpu"):
    """One call on every instruction set, on unaligned views between poisoned neighbours."""
    expected = oracle.prune(grad, pruning, wire)
    chances_R = pruning.tie_chances_R
    for isa in cases.ISAS if device == "cpu" else [cases.ISAS[0]]:
        got_grad, got_residual = (cases.unaligned(t.to(device)) for t in (grad, pruning.residual_N))
        moved = replace(
            pruning,
            residual_N=got_residual,
            thresholds_R=pruning.thresholds_R.to(device),
            tie_chances_R=None if chances_R is None else chances_R.to(device),
        )
        with mock.patch.dict(os.environ, MEGATRON_SPARSE_ISA=isa):
            nnz = ops.prune_(got_grad, moved, wire)
        where, sides = f"{isa} {what}", (got_grad.cpu(), expected[0])
        # A GPU's additions make a NaN of their own.
        given = map(one_nan, sides) if device == "cuda" else sides
        cases.assert_same_bits(*given, f"{where}: grad")
        cases.assert_same_bits(got_residual.cpu(), expected[1], f"{where}: residual")
        assert torch.equal(nnz.cpu(), expected[2]), where
        for buffer in (got_grad, got_residual):
            room = buffer._base
            assert room is not None
            assert room[0].isnan(), f"{where}: written before the buffer"
            assert room[-1].isnan(), f"{where}: written behind it"
    return expected


@devices
@pytest.mark.parametrize("wire", range(3))
@pytest.mark.parametrize("residual_dtype", cases.RESIDUAL_DTYPES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_equals_the_oracle(dtype, residual_dtype, wire, device):
    for numel in cases.SIZES if device == "cuda" else cases.SIZES[:-1]:
        offsets = cases.cut(numel, 5, seed=numel)
        # Keeps all, drops all but infinity, in between twice, and nothing but NaN and infinity.
        thresholds = torch.tensor([-1.0, math.inf, 1e-3, 1.0, cases.FLT_MAX])
        chances = torch.tensor([0.9, 0.5, 0.3, 0.6, 1.0])
        for kind in cases.kinds(numel):
            grad = cases.make(kind, numel, dtype, seed=1)
            residual = cases.make(kind, numel, residual_dtype, seed=2)
            for leak, key, ties in (
                (1.0, KEY, chances),
                (0.9, -1, chances),
                (0.9, 2**63 - 1, chances),
                (0.9, KEY, None),
            ):
                what = f"{kind} {numel} leak {leak} key {key} {ties}"
                pruning = Pruning(residual, offsets, thresholds, leak, key, tie_chances_R=ties)
                check(grad, pruning, wire, what, device)


@devices
@pytest.mark.parametrize("wire", range(3))
@pytest.mark.parametrize("residual_dtype", cases.RESIDUAL_DTYPES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_ties_are_drawn_as_the_oracle_draws_them(dtype, residual_dtype, wire, device):
    """Whole numbers: a quarter of each range ties; with the threshold 0 only zeros would."""
    numel = 4097
    generator = torch.Generator().manual_seed(wire)
    grad = torch.randint(-2, 3, (numel,), generator=generator).to(dtype)
    residual = torch.randint(-2, 3, (numel,), generator=generator).to(residual_dtype)
    offsets = cases.cut(numel, 6, seed=wire)
    thresholds = torch.tensor([0.0, 1.0, 2.0, 2.0, 3.0, 1.5])
    chances = torch.tensor([1.0, 0.25, 1.0, 0.0, 0.75, 1.0])
    for leak, key in ((1.0, KEY), (0.9, -1)):
        pruning = Pruning(residual, offsets, thresholds, leak, key, tie_chances_R=chances)
        check(grad, pruning, wire, f"key {key}", device)


def test_a_tie_is_kept_with_its_chance_and_a_zero_never():
    numel, chance = 2**18, 0.3
    pruned = []
    for key in (1, 2, 2):
        grad, residual = torch.full((numel,), -2.0), torch.zeros(numel)
        pruning = pruning_of(residual, 2.0, key=key, chance=chance)
        kept = int(ops.prune_(grad, pruning, 0))
        assert torch.equal(grad + residual, torch.full((numel,), -2.0)), "nothing is lost"
        assert abs(kept / numel - chance) < 4 * math.sqrt(chance * (1 - chance) / numel)
        pruned.append(grad != 0)
    assert torch.equal(pruned[1], pruned[2])
    both = float((pruned[0] & pruned[1]).float().mean())
    assert abs(both - chance**2) < 0.01, "draws of two keys are independent"

    grad = torch.full((100,), -0.0)
    assert int(ops.prune_(grad, pruning_of(torch.zeros(100), 0.0, key=1, chance=1.0), 0)) == 0
    assert not bool(grad.signbit().any()), "what is dropped becomes 0, not -0"


@pytest.mark.parametrize(
    ("dtype", "wire"), [(torch.float32, 0), (torch.float32, 2), (torch.bfloat16, 1)]
)
def test_large_and_independent_of_the_thread_count(dtype, wire):
    numel = cases.SIZES[-1]
    offsets = cases.cut(numel, 40)
    thresholds = torch.rand(40, generator=torch.Generator().manual_seed(0))
    for threads in (1, 2):
        with on_threads(threads):
            grad, residual = (cases.make("spread", numel, d, seed=3) for d in (dtype, dtype))
            if dtype == torch.bfloat16:
                residual = residual.float()
            pruning = Pruning(
                residual, offsets, thresholds, 1.0, KEY, tie_chances_R=thresholds.flip(0)
            )
            check(grad, pruning, wire, f"{threads} threads")


def test_a_nan_threshold_keeps_everything():
    grad = cases.make("special", 100, torch.float32)
    residual = torch.zeros(100)
    for pruning in (pruning_of(residual, math.nan), pruning_of(residual, math.nan, chance=0.5)):
        check(grad, pruning, 0, "")


def test_every_element_may_be_its_own_range():
    grad = cases.make("spread", 513, torch.float32, seed=7)
    thresholds = torch.rand(513)
    thresholds[::3] = grad[::3].abs()
    pruning = Pruning(
        torch.zeros(513), torch.arange(514), thresholds, 1.0, KEY, tie_chances_R=torch.rand(513)
    )
    check(grad, pruning, 1, "tiny ranges")


@pytest.mark.parametrize(
    ("problem", "changes", "wire"),
    [
        *((problem, changes, 0) for problem, changes in BAD_SELECTIONS.items()),
        ("grad has the wrong shape", {"grad": torch.zeros(16)[::2]}, 0),
        ("a capacity is given", {"capacity_S": torch.tensor([3])}, 0),
        ("an old residual is given", {"old_residual_N": torch.zeros(8)}, 0),
        ("wire_dtype is unknown", {}, 3),
    ],
)
def test_refuses(problem, changes, wire):
    """`tests/formats/test_message.py` has the selections with `prune_encode`."""
    own = {name: value for name, value in changes.items() if name != "grad"}
    pruning = replace(pruning_of(torch.zeros(8), 0.0, key=0), **own)
    with pytest.raises(ExtensionError, match=problem):
        ops.prune_(changes.get("grad", torch.zeros(8)), pruning, wire)


@pytest.mark.parametrize("offsets", [[0, 9], [1, 8], [0, 5, 3, 8], [-1, 8]])
def test_the_op_itself_checks_for_access_beyond_the_buffers(offsets):
    ops.supported_isas()  # loads the library
    op = torch.ops.megatron_sparse.prune_.default
    thresholds = torch.zeros(len(offsets) - 1)
    with pytest.raises(RuntimeError, match="range_offsets"):
        op(torch.zeros(8), torch.zeros(8), torch.tensor(offsets), thresholds, 1.0, 0, 0)


def test_an_unknown_instruction_set_is_one_typed_error(monkeypatch):
    monkeypatch.setenv("MEGATRON_SPARSE_ISA", "avx1024")
    zeros = torch.zeros(1)
    for call in (
        lambda: ops.prune_(zeros, pruning_of(zeros, 0.0, key=0), 0),
        lambda: encode_moves(zeros, zeros, epoch=0),
    ):
        with pytest.raises(ExtensionError) as caught:
            call()
        assert caught.value.got == "avx1024"
        assert "portable" in str(caught.value.expected)
