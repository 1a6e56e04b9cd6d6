"""The plugin's state in Megatron's distributed checkpoint: rows, sums, sizes that change."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import CheckpointError
from megatron_sparse.megatron import checkpoint
from megatron_sparse.megatron.checkpoint_layout import HeldSlice, ResidualRow, Saved, part_of_sum
from tests.megatron.checkpoint_cases import loaded, save
from tests.megatron.parallel_gpt import IN_FP32, OVERLAP, Layout
from tests.megatron.train_ranks import (
    SPARSE,
    equal,
    of_all_ranks,
    on_ranks,
    running,
    train_ranks,
)

TIMEOUT_S = 500.0
"""A test machine may be many times slower than a quiet one, of which a launch takes ten seconds."""
STEPS = 3
NORMS = [1.5, 2.5]
"""Of gradients before the checkpoint."""


def _small(bucket_size=8_000, **options):
    layout = Layout(ddp=OVERLAP | {"bucket_size": bucket_size})
    return running(layout, **(SPARSE | options))


def _save_all(rank, folder):
    """A checkpoint in each mode, and one of another version, all of the same state.

    Returns the residuals, and the elements of all parameters of all buckets.
    """
    from megatron_sparse.megatron import checkpoint_layout

    with _small() as run:
        for _ in range(STEPS):
            run.step()
        run.attachment.usual_norm.norms.extend(NORMS)
        for mode in ("full", "sum", "none"):
            run.attachment.enabled = mode != "none"
            save(run.attachment, folder / mode, mode)
        common = checkpoint_layout.common_state(run.attachment)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_layout, "common_state", lambda _: common | {"version": 2})
            save(run.attachment, folder / "version")
        pieces = [piece for bucket in run.attachment.buckets for piece in bucket.parameters]
        return run.residuals(), sum(piece.numel for piece in pieces)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a checkpoint of each kind, the residuals of two ranks, and their elements."""
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "empty").mkdir()
    ranks = train_ranks(_save_all, 2, folder, timeout_s=TIMEOUT_S)
    return folder, [residuals for residuals, _ in ranks], ranks[0][1]


def _loaded(folder, **options):
    return loaded(folder, _small(**options))


def _assert_refused(words, folder):
    with pytest.raises(CheckpointError, match=words), _loaded(folder):
        pass


@pytest.mark.parametrize("bucket_size", [8_000, None])
@on_ranks(2)
def test_every_rank_gets_its_own_row_back_bit_for_bit(rank, saved, bucket_size):
    folder, held, _ = saved
    with _loaded(folder / "full", bucket_size=bucket_size) as (run, _):
        assert run.attachment.step == STEPS
        assert list(run.attachment.usual_norm.norms) == NORMS
        assert equal(run.residuals(), held[rank])
        assert run.step() is True


@on_ranks(2)
def test_a_sum_is_given_out_whole_and_each_element_to_one_rank(rank, saved):
    folder, held, _ = saved
    with _loaded(folder / "sum") as (run, said):
        first, second = of_all_ranks(run.residuals())
    for name, own in held[0].items():
        # With two ranks the sum takes one addition, whatever its order: exact.
        assert torch.equal(first[name] + second[name], own + held[1][name])
        assert not (first[name].bool() & second[name].bool()).any()
    assert "from their sum" in "".join(said) or rank != 0


@on_ranks(2)
def test_a_rank_without_residuals_takes_part_in_the_sum(rank, saved):
    """After a change of buckets a resumed rank may have none where another one does."""
    folder, held, _ = saved
    with _loaded(folder / "full", residual_checkpoint=("full", "none")[rank]) as (run, _):
        save(run.attachment, folder / "of_rank_0", "sum")
    with _loaded(folder / "of_rank_0") as (run, _):
        first, second = of_all_ranks(run.residuals())
    assert equal({name: first[name] + second[name] for name in first}, held[0])


def _tensor_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


def test_sizes_on_disk_are_what_the_documentation_says(saved):
    """`full` writes a residual for each rank, `sum` one, beside what `none` writes too."""
    folder, held, numel = saved
    base = _tensor_bytes(folder / "none")
    full, total = (_tensor_bytes(folder / mode) - base for mode in ("full", "sum"))
    # torch.save puts a header of one to two kilobytes before each tensor.
    header = 2048 * len(held[0])
    assert 0 < full - 2 * 4 * numel < 2 * header
    assert 0 < total - 4 * numel < header
    assert base < 0.2 * total


@pytest.mark.parametrize(
    ("mode", "wanted", "words"),
    [
        ("none", "full", "saved with compression.residual_checkpoint=none"),
        ("full", "none", "start at zero (compression.residual_checkpoint=none)"),
    ],
)
@on_ranks(2)
def test_without_residuals_the_step_is_kept_and_the_log_says_so(rank, saved, mode, wanted, words):
    with _loaded(saved[0] / mode, residual_checkpoint=wanted) as (run, said):
        assert run.attachment.step == STEPS
        assert run.attachment.enabled is (mode != "none")
        assert not any(view.any() for view in run.residuals().values())
    assert (words in "".join(said)) is (rank == 0)


@on_ranks(2)
def test_another_model_parallel_layout_is_refused_unless_residuals_are_not_wanted(rank, saved):
    from megatron_sparse.megatron import checkpoint_layout

    folder = saved[0] / "full"
    layers = checkpoint_layout.model_layers

    def moved(attachment):
        return {name: number + 1 for name, number in layers(attachment).items()}

    pytest.MonkeyPatch().setattr(checkpoint_layout, "model_layers", moved)
    _assert_refused("another split of layers", folder)
    pytest.MonkeyPatch().setattr(checkpoint_layout, "model_sizes", lambda: (2, 1, 1))
    _assert_refused("another model-parallel layout", folder)
    with _loaded(folder, residual_checkpoint="none") as (run, _):
        assert run.attachment.step == STEPS


@on_ranks(2)
def test_what_does_not_fit_is_refused(rank, saved):
    from megatron_sparse.megatron import checkpoint_sharded

    folder, entries = saved[0], checkpoint_sharded._entries
    _assert_refused("was written by another version", folder / "version")

    def longer(checkpoint):
        return {
            key: replace(entry, size=(*entry.size[:-1], entry.size[-1] + 1))
            if ".residual." in key
            else entry
            for key, entry in entries(checkpoint).items()
        }

    pytest.MonkeyPatch().setattr(checkpoint_sharded, "_entries", longer)
    _assert_refused("does not fit", folder / "full")


@pytest.mark.parametrize(("name", "wanted"), [("empty", "full"), ("version", "none")])
@on_ranks(2)
def test_without_state_of_this_version_residuals_start_at_zero_and_the_log_says_so(
    rank, saved, name, wanted
):
    with _loaded(saved[0] / name, residual_checkpoint=wanted) as (run, said):
        assert run.attachment.step == 77
        assert not any(view.any() for view in run.residuals().values())
    assert "residuals start at zero, step 77" in "".join(said)


@pytest.mark.parametrize(
    ("wanted", "mode", "rows", "said"),
    [
        ("full", "full", 4, ["residuals restored"]),
        ("full", "sum", 4, ["residuals restored from their sum"]),
        ("none", "full", 2, ["(compression.residual_checkpoint=none)"]),
        ("full", "none", 2, ["(saved with compression.residual_checkpoint=none)"]),
        ("full", "full", 2, ["residuals restored", "of 2 ranks (dense) and are of 4 ranks"]),
    ],
)
def test_the_log_says_how_residuals_came_back(monkeypatch, wanted, mode, rows, said):
    monkeypatch.setattr(checkpoint, "row_layouts", lambda _: {"dense": ("rank", 4)})
    config = SparseConfig.from_overrides(residual_checkpoint=wanted)
    attachment = SimpleNamespace(step=7, config=config)
    saved = Saved(7, enabled=True, mode=mode, rows={"dense": ("rank", rows)})
    lines = checkpoint._residual_lines(attachment, Path("iter_7"), saved)
    assert len(lines) == len(said)
    assert lines[0].startswith("iter_7, step 7: ")
    for line, words in zip(lines, said, strict=True):
        assert words in line


@on_ranks(2)
def test_with_compression_switched_off_the_residual_goes_with_the_next_step(rank, saved):
    folder, held, _ = saved
    with _loaded(folder / "full", enabled=False) as (run, _):
        assert equal(run.residuals(), held[rank])
        run.step()
        assert not any(view.any() for view in run.residuals().values())


BF16 = Layout(precision="bf16", ddp=IN_FP32)
FP16 = replace(BF16, precision="fp16", optimizing={"initial_loss_scale": 2.0**10})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FP16, BF16),
        (BF16, FP16),
        (Layout(per_token=True), Layout()),
        (Layout(), Layout(per_token=True)),
    ],
)
@on_ranks(1)
def test_residuals_are_converted_to_the_unit_of_another_precision_or_loss(
    rank, tmp_path, before, after
):
    with running(before, **SPARSE) as run:
        run.step()
        expected = run.attachment.residual_norm()
        save(run.attachment, tmp_path / "saved")
    with loaded(tmp_path / "saved", running(after, **SPARSE)) as (other, _):
        assert expected > 0
        assert other.attachment.residual_norm() == pytest.approx(expected, rel=1e-5)  # fp32
        other.step()
        assert other.attachment.grad_norm < 10 * expected, "of which residuals are a part"
        # The unit of the next step is known after it: residuals are converted then at the latest.
        assert other.attachment.residual_norm() > expected / 2


def _load_modes(rank, folder):
    found = {}
    for mode in ("full", "sum"):
        with _loaded(folder / mode) as (run, said):
            found[mode] = run.residuals(), said
            assert run.step() is True
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_another_data_parallel_size_preserves_the_total(saved, size):
    """Of both modes; with three ranks the third has no row of two, but a part of the sum."""
    folder, held, _ = saved
    moved = train_ranks(_load_modes, size, folder, timeout_s=TIMEOUT_S)
    for name, own in held[0].items():
        total = own + held[1][name]
        for mode in ("full", "sum"):
            rows = [rank[mode][0].get(name, torch.zeros_like(total)) for rank in moved]
            assert torch.equal(sum(rows[1:], rows[0]), total)
    said = f"of 2 ranks (dense) and are of {size} ranks (dense)"
    assert said in "".join(moved[0]["full"][1])


NUMEL = 11


def _held(start, stop, row=0, count=2):
    piece = ParameterSlice("w", 0, stop - start, offset=start)
    bucket = Bucket("0", torch.zeros(stop - start), [piece], CollectiveOp.ALL_REDUCE, 1)
    return HeldSlice(bucket, piece, NUMEL, False, ResidualRow("node", row, count))


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_parts_of_a_sum_do_not_depend_on_how_rows_are_cut(count):
    total_P = torch.arange(1.0, NUMEL + 1)
    rows = []
    for row in range(count):
        parts = [
            part_of_sum(total_P[start:stop], _held(start, stop, row, count))
            for start, stop in [(0, 3), (3, 4), (4, 11)]
        ]
        rows.append(torch.cat(parts))
        assert torch.equal(rows[-1], part_of_sum(total_P, _held(0, NUMEL, row, count)))
    assert torch.equal(torch.stack(rows).sum(0), total_P)
    assert (torch.stack(rows) != 0).sum() == NUMEL


def test_nodes_of_each_instance_have_rows_of_their_own(monkeypatch):
    from megatron_sparse.megatron import checkpoint_layout as layout

    def row(level, node, instance):
        monkeypatch.setattr(layout.dist, "get_rank", lambda group: instance)
        monkeypatch.setattr(layout.dist, "get_world_size", lambda group: 3)
        across = SimpleNamespace(rank=node, world_size=2)
        reducer = SimpleNamespace(level_groups=SimpleNamespace(level=level, across=across))
        found = layout.row_of(
            SimpleNamespace(reducer=lambda _: reducer),
            SimpleNamespace(instances_group=object(), expert=False),
        )
        return found.index, found.count

    assert [row("node", n, i) for i in range(3) for n in range(2)] == [(r, 6) for r in range(6)]
    assert row("instance", 1, 2) == (1, 2)
