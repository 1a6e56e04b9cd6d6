"""The plugin's state in Megatron's distributed checkpoint: rows, sums, sizes that change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.megatron import test_parallel
from tests.megatron.checkpoint_cases import (
    MODES,
    OPTIONS,
    STEPS,
    attached,
    gradient_numel,
    load_and_go_on,
    pruned_stores,
    save,
)
from tests.megatron.parallel_gpt import PRUNED_FROM, parallel_state_of
from tests.megatron.train_ranks import equal, running, train_ranks
from tests.ranks import MEGATRON, run_ranks

TIMEOUT_S = 500.0
"""A test machine may be many times slower than a quiet one, of which a launch takes ten seconds."""

NORMS = [1.5, 2.5]
"""Of gradients before the checkpoint."""
REFUSED = {
    "version": "was written by another version",
    "files": "was written by another version",
    "size": "does not fit",
}
LAYOUTS = {
    name: test_parallel.LAYOUTS[name]
    for name in ("expert_and_tensor", "virtual_pipeline", "instances")
}


def _save_all(rank, world_size, folder):
    """One checkpoint for each mode, all of the same state; then the state that each restores."""
    model, attachment = attached()
    for _ in range(STEPS):
        model.step()
    held = pruned_stores(attachment)
    attachment.usual_norm.norms.extend(NORMS)
    for mode in MODES:
        save(attachment, Path(folder, mode), mode)
    numel = gradient_numel(attachment)
    results = {mode: load_and_go_on(Path(folder, mode)) for mode in MODES}
    results["other buckets"] = load_and_go_on(Path(folder, "full"), bucket_size=None)
    results["not wanted"] = load_and_go_on(Path(folder, "full"), residual_checkpoint="none")
    results["off"] = load_and_go_on(Path(folder, "full"), enabled=False)
    results |= _as_if_tensor_parallel(Path(folder, "full"))
    results |= _with_state_of_others(attachment, Path(folder))
    return held, results, numel


def _with_state_of_others(attachment, folder):
    """What loads from state of another version and size."""
    from megatron_sparse.megatron import checkpoint_layout, checkpoint_sharded

    common = checkpoint_layout.common_state(attachment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_sharded, "common_state", lambda _: common | {"version": 2})
        save(attachment, folder / "version")
    (folder / "files/megatron_sparse").mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        (folder / f"files/megatron_sparse/rank_{rank:05d}.pt").touch()
    (folder / "empty").mkdir(exist_ok=True)
    results = {name: load_and_go_on(folder / name) for name in ("empty", "version", "files")}
    with pytest.MonkeyPatch.context() as patch:
        entries = checkpoint_sharded._entries

        def longer(checkpoint):
            return {
                key: replace(entry, shape=(*entry.shape[:-1], entry.shape[-1] + 1))
                if ".residual." in key
                else entry
                for key, entry in entries(checkpoint).items()
            }

        patch.setattr(checkpoint_sharded, "_entries", longer)
        results["size"] = load_and_go_on(folder / "full")
    for name in ("version", "files"):
        results[f"{name}, not wanted"] = load_and_go_on(folder / name, residual_checkpoint="none")
    return results


def _as_if_tensor_parallel(folder):
    """The result for a rank of a model with another layout."""
    from megatron_sparse.megatron import checkpoint_layout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_layout, "model_sizes", lambda: (2, 1, 1))
        return {
            "layout": load_and_go_on(folder),
            "layout, not wanted": load_and_go_on(folder, residual_checkpoint="none"),
        }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder for each mode; the saved and the restored state of each of two ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run_ranks(_save_all, 2, str(folder), timeout_s=TIMEOUT_S, imported=MEGATRON)


def test_every_rank_gets_its_own_row_back_bit_for_bit(saved):
    for held, results, _ in saved[1]:
        for case in ("full", "other buckets"):
            result = results[case]
            assert result["step"] == STEPS
            assert result["norms"] == NORMS
            assert result["stores"].keys() == held.keys()
            assert all(torch.equal(result["stores"][name], held[name]) for name in held)
            assert result["goes on"] is True


def test_other_buckets_are_named_in_the_log(saved):
    messages = saved[1][0][1]["other buckets"]["messages"]
    assert any("residuals move by parameter name" in line for line in messages)
    assert not any("parameter name" in line for line in saved[1][0][1]["full"]["messages"])


def test_a_sum_is_given_out_whole_and_each_element_to_one_rank(saved):
    ranks = saved[1]
    for name in ranks[0][0]:
        total = ranks[0][0][name] + ranks[1][0][name]
        parts = [results["sum"]["stores"][name] for _, results, _ in ranks]
        # With two ranks the sum takes one addition, whatever its order: exact.
        assert torch.equal(parts[0] + parts[1], total)
        assert not (parts[0].bool() & parts[1].bool()).any()
    assert any("from their sum" in line for line in ranks[0][1]["sum"]["messages"])


def _tensor_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


def test_sizes_on_disk_are_what_the_documentation_says(saved):
    """`full` writes a residual for each rank, `sum` one, beside what `none` writes too."""
    folder, ranks = saved
    numel = ranks[0][2]
    base = _tensor_bytes(folder / "none")
    full, total = (_tensor_bytes(folder / mode) - base for mode in ("full", "sum"))
    # torch.save puts a header of one to two kilobytes before each tensor.
    header = 2048 * len(ranks[0][0])
    assert 0 < full - 2 * 4 * numel < 2 * header
    assert 0 < total - 4 * numel < header
    assert base < 0.2 * total


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("none", "saved with compression.residual_checkpoint=none"),
        ("not wanted", "start at zero (compression.residual_checkpoint=none)"),
    ],
)
def test_without_residuals_the_step_is_kept_and_the_log_says_so(saved, case, words):
    for rank, (_, results, _) in enumerate(saved[1]):
        result = results[case]
        assert result["step"] == STEPS
        assert not any(view.any() for view in result["stores"].values())
        assert any(words in line for line in result["messages"]) is (rank == 0)


def test_another_model_parallel_layout_is_refused_unless_residuals_are_not_wanted(saved):
    for _, results, _ in saved[1]:
        assert "another model-parallel layout" in results["layout"]["error"]
        assert results["layout, not wanted"]["step"] == STEPS


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_does_not_fit_is_refused(saved, case):
    for _, results, _ in saved[1]:
        assert REFUSED[case] in results[case]["error"]


@pytest.mark.parametrize("case", ["empty", "version, not wanted", "files, not wanted"])
def test_without_state_of_this_version_residuals_start_at_zero_and_the_log_says_so(saved, case):
    for _, results, _ in saved[1]:
        result = results[case]
        assert result["step"] == 77
        assert not any(view.any() for view in result["stores"].values())
        assert any("residuals start at zero, step 77" in line for line in result["messages"])


def test_with_compression_switched_off_the_residual_goes_with_the_next_step(saved):
    for held, results, _ in saved[1]:
        result = results["off"]
        assert all(torch.equal(result["stores"][name], held[name]) for name in held)
        assert not any(view.any() for view in result["after"].values())
    assert any("switched off" in line for line in saved[1][0][1]["off"]["messages"])


def _load_modes(rank, world_size, folder):
    return {mode: load_and_go_on(Path(folder, mode)) for mode in ("full", "sum")}


@pytest.mark.parametrize("size", [1, 3])
def test_another_data_parallel_size_preserves_the_total(saved, size):
    """Of both modes; with three ranks the third has no row of two, but a part of the sum."""
    folder, ranks = saved
    moved = run_ranks(_load_modes, size, str(folder), timeout_s=TIMEOUT_S, imported=MEGATRON)
    for name in ranks[0][0]:
        total = ranks[0][0][name] + ranks[1][0][name]
        for mode in ("full", "sum"):
            rows = [result[mode]["stores"].get(name, torch.zeros_like(total)) for result in moved]
            assert torch.equal(sum(rows[1:], rows[0]), total)
    messages = moved[0]["full"]["messages"]
    assert any(f"data-parallel size was 2 and is {size}" in line for line in messages)
    assert all(result["full"]["goes on"] for result in moved)


def _round_trip(layout, folder):
    """Whether each mode restores the saved state: rows exactly, and the sum over ranks."""
    from megatron.core import parallel_state

    from megatron_sparse.megatron import checkpoint
    from megatron_sparse.megatron.checkpoint_layout import model_parameters

    options = OPTIONS | {"density": 0.1, "keep_below_numel": PRUNED_FROM}
    with running(layout, **options) as run:
        run.step()
        held = run.residuals()
        experts = {name for expert, name in model_parameters(run.attachment) if expert}
        for mode in ("full", "sum"):
            save(run.attachment, Path(folder, mode), mode)
    report = {"experts": bool(experts), "held": len(held)}
    for mode in ("full", "sum"):
        with running(layout, **options) as again:
            checkpoint.load(again.attachment, Path(folder, mode), iteration=77)
            got = again.residuals()
        if mode == "full":
            report[mode] = equal(got, held)
            continue
        report[mode] = got.keys() == held.keys()
        for name, own in held.items():
            if name in experts:
                group = parallel_state.get_expert_data_parallel_group()
            else:
                group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            totals = [view.double() for view in (got[name], own)]
            for total in totals:
                torch.distributed.all_reduce(total, group=group)
            # Up to three fp32 additions, each of which rounds by 6e-8 of a partial sum.
            report[mode] &= torch.allclose(*totals, rtol=1e-5, atol=1e-7)
    return report


def _round_trips(rank, folder):
    reports = {}
    for name, layout in LAYOUTS.items():
        with parallel_state_of(layout):
            reports[name] = _round_trip(layout, Path(folder, name))
    return reports


@pytest.fixture(scope="module")
def round_trips(tmp_path_factory):
    return train_ranks(
        _round_trips, 4, str(tmp_path_factory.mktemp("layouts")), timeout_s=TIMEOUT_S
    )


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_layout_gets_its_residuals_back(round_trips, name):
    for rank in round_trips:
        report = rank[name]
        assert report["held"] > 0
        assert report["full"]
        assert report["sum"]
        assert report["experts"] is (name == "expert_and_tensor")
