"""The plugin's state in its own files: changed sizes, damaged and missing files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.megatron.checkpoint_cases import STEPS, attached, load_and_go_on, pruned_stores
from tests.ranks import run_ranks

TIMEOUT_S = 500.0
"""A test machine may be many times slower than a quiet one."""


def _save(rank, world_size, folder):
    """One checkpoint for each mode, all of the same state."""
    model, attachment = attached()
    from megatron_sparse.megatron import checkpoint

    for _ in range(STEPS):
        model.step()
    for mode in ("sum", "none", "full"):
        attachment.config.compression.residual_checkpoint = mode
        path = checkpoint.save(attachment, Path(folder, mode))
        assert not path.with_suffix(".part").exists()
    return pruned_stores(attachment)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a checkpoint of two ranks for each mode, and each rank's state."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, run_ranks(_save, 2, str(folder), timeout_s=TIMEOUT_S)


def test_assume_constant_structure_is_refused():
    from megatron_sparse.errors import ConfigError
    from megatron_sparse.megatron.checkpoint_layout import check_structure

    for constant, mode in ((False, "full"), (True, "none")):
        check_structure(constant=constant, mode=mode)
    with pytest.raises(ConfigError, match="residuals appear while training"):
        check_structure(constant=True, mode="sum")


def _copy(folder, target):
    (target / "megatron_sparse").mkdir(parents=True)
    for path in (folder / "megatron_sparse").iterdir():
        (target / "megatron_sparse" / path.name).write_bytes(path.read_bytes())


def _rewrite(folder, change):
    for path in folder.iterdir():
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)


def _to_version_2(state):
    """Stores held whole parameters, by name."""
    state["stores"] = {
        store: {name: value for (name, _), value in values.items()}
        for store, values in state["stores"].items()
    }
    del state["rows"], state["row"]
    state["version"] = 2


def _to_version_1(state):
    """The plugin's files in their first version, which held only residuals."""
    _to_version_2(state)
    state["residuals"] = state.pop("stores")["residual"]
    for key in ("mode", "gradient_factor", "buckets"):
        del state[key]
    for key in [key for key in state["place"] if key.startswith("expert_") and key[7:] != "size"]:
        del state["place"][key]
    state["version"] = 1


def _load_all(rank, world_size, cases):
    return {name: load_and_go_on(Path(path), **options) for name, (path, options) in cases.items()}


OLD = {"version 1": _to_version_1, "version 2": _to_version_2}
REFUSED = {
    "layout": "another model-parallel layout",
    "version": "written by another version",
    "size": "does not fit",
    "damaged": "is damaged",
}


@pytest.fixture(scope="module")
def loaded(saved, tmp_path_factory):
    """The state that two ranks restore from the checkpoint, intact and damaged in several ways."""
    whole = saved[0] / "full"
    folder = tmp_path_factory.mktemp("spoilt")
    for name in (*REFUSED, "missing", *OLD):
        _copy(whole, folder / name)
    (folder / "missing/megatron_sparse/rank_00001.pt").unlink()
    _rewrite(folder / "layout/megatron_sparse", lambda s: s["place"].update(tensor_size=2))
    _rewrite(folder / "version/megatron_sparse", lambda s: s.update(version=99))
    _rewrite(
        folder / "size/megatron_sparse",
        lambda s: s["stores"]["residual"].update(
            {name: value[:-1] for name, value in s["stores"]["residual"].items()}
        ),
    )
    for name, change in OLD.items():
        _rewrite(folder / name / "megatron_sparse", change)
    for path in (folder / "damaged/megatron_sparse").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    cases = {name: (str(folder / name), {}) for name in (*REFUSED, "missing", *OLD)}
    cases["other buckets"] = (str(whole), {"bucket_size": None})
    cases["sum"] = (str(saved[0] / "sum"), {})
    return run_ranks(_load_all, 2, cases, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("case", ["other buckets", *OLD])
def test_the_same_size_gives_every_rank_its_own_back(saved, loaded, case):
    """With any buckets, and from files of earlier versions too."""
    for results, own in zip(loaded, saved[1], strict=True):
        result = results[case]
        assert result["step"] == STEPS
        assert result["stores"].keys() == own.keys()
        assert all(torch.equal(result["stores"][name], own[name]) for name in own)
        assert result["goes on"] is True


def test_a_missing_rank_starts_every_rank_at_zero_and_says_so(loaded):
    for results in loaded:
        result = results["missing"]
        assert result["step"] == 77
        assert not any(view.any() for view in result["stores"].values())
        assert any("residuals start at zero" in message for message in result["messages"])


@pytest.mark.parametrize("spoilt", list(REFUSED))
def test_what_does_not_fit_is_refused(loaded, spoilt):
    for results in loaded:
        assert REFUSED[spoilt] in results[spoilt]["error"]


@pytest.fixture(scope="module")
def alone(saved):
    """The state that one rank restores from the checkpoint of two."""
    cases = {mode: (str(saved[0] / mode), {}) for mode in ("full", "sum", "none")}
    return run_ranks(_load_all, 1, cases, timeout_s=TIMEOUT_S)[0]


@pytest.mark.parametrize("mode", ["full", "sum"])
def test_another_data_parallel_size_preserves_the_total(saved, alone, mode):
    held = saved[1]
    for name in held[0]:
        assert torch.equal(alone[mode]["stores"][name], held[0][name] + held[1][name])
    assert any("data-parallel size was 2" in message for message in alone[mode]["messages"])


def test_a_sum_is_given_out_whole(saved, loaded):
    held = saved[1]
    for name in held[0]:
        parts = [results["sum"]["stores"][name] for results in loaded]
        assert torch.equal(parts[0] + parts[1], held[0][name] + held[1][name])


def test_residual_checkpoint_none_keeps_the_step_and_drops_the_residual(saved, alone):
    for path in (saved[0] / "none/megatron_sparse").iterdir():
        assert path.stat().st_size < 10_000
    assert alone["none"]["step"] == STEPS
    assert not any(view.any() for view in alone["none"]["stores"].values())
