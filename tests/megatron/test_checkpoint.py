"""The plugin's part of a checkpoint: sizes that change, files that are damaged or missing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from megatron_sparse.megatron import cpu_mode
from tests.ranks import run_ranks

STEPS = 3
OPTIONS = {
    "density": 0.05, "scheme": "agsparse", "warmup_iters": 0, "ramp_iters": 0,
    "keep_below_numel": 256,
}  # fmt: skip


def _attached(**options):
    cpu_mode.enable()
    from megatron_sparse.megatron import attach
    from megatron_sparse.megatron.small_gpt import SmallGPT, SmallGPTConfig

    model = SmallGPT(SmallGPTConfig(bucket_size=options.pop("bucket_size", 40_000), overlap=True))
    return model, attach(model.ddp, model.optimizer, **(OPTIONS | options))


def _residuals(attachment):
    return {name: view.clone() for name, view in attachment.residuals.by_parameter()}


def _save(rank, world_size, folder, **options):
    model, attachment = _attached(**options)
    from megatron_sparse.megatron import checkpoint

    for _ in range(STEPS):
        model.step()
    path = checkpoint.save(attachment, Path(folder))
    assert not path.with_suffix(".part").exists()
    return _residuals(attachment)


def _load(rank, world_size, folder, options):
    model, attachment = _attached(**options)
    from megatron_sparse.errors import CheckpointError
    from megatron_sparse.megatron import checkpoint

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("megatron_sparse").addHandler(handler)
    logging.getLogger("megatron_sparse").setLevel(logging.INFO)
    try:
        checkpoint.load(attachment, Path(folder), iteration=77)
    except CheckpointError as error:
        return {"error": str(error)}
    loaded = _residuals(attachment)
    return {
        "step": attachment.step, "residuals": loaded, "messages": messages,
        "goes on": model.step()[1],
    }  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks, and what each held."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, run_ranks(_save, 2, str(folder))


def _copy(folder, target):
    for path in (folder / "megatron_sparse").iterdir():
        copied = target / "megatron_sparse" / path.name
        copied.parent.mkdir(exist_ok=True)
        copied.write_bytes(path.read_bytes())
    return target / "megatron_sparse"


def _copy(folder, target):
    (target / "megatron_sparse").mkdir(parents=True)
    for path in (folder / "megatron_sparse").iterdir():
        (target / "megatron_sparse" / path.name).write_bytes(path.read_bytes())
    return target / "megatron_sparse"


def _rewrite(folder, change):
    for path in folder.iterdir():
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)


def _load_all(rank, world_size, cases):
    return {name: _load(rank, world_size, *case) for name, case in cases.items()}


REFUSED = {
    "layout": "another model-parallel layout",
    "version": "written by another version",
    "size": "does not fit",
    "damaged": "is damaged",
}


@pytest.fixture(scope="module")
def loaded(saved, tmp_path_factory):
    """What two ranks get from the checkpoint, whole and spoilt in several ways."""
    folder = tmp_path_factory.mktemp("spoilt")
    for name in (*REFUSED, "missing"):
        _copy(saved[0], folder / name)
    (folder / "missing/megatron_sparse/rank_00001.pt").unlink()
    _rewrite(folder / "layout/megatron_sparse", lambda s: s["place"].update(tensor_size=2))
    _rewrite(folder / "version/megatron_sparse", lambda s: s.update(version=99))
    _rewrite(
        folder / "size/megatron_sparse",
        lambda s: s["residuals"].update({n: v[:-1] for n, v in s["residuals"].items()}),
    )
    for path in (folder / "damaged/megatron_sparse").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    cases = {name: (str(folder / name), {}) for name in (*REFUSED, "missing")}
    cases["other buckets"] = (str(saved[0]), {"bucket_size": None})
    return run_ranks(_load_all, 2, cases, timeout_s=200)


def test_the_same_size_gives_every_rank_its_own_back_whatever_the_buckets(saved, loaded):
    for results, own in zip(loaded, saved[1], strict=True):
        result = results["other buckets"]
        assert result["step"] == STEPS
        assert result["residuals"].keys() == own.keys()
        assert all(torch.equal(result["residuals"][name], own[name]) for name in own)
        assert result["goes on"] is True


def test_a_missing_rank_starts_every_rank_at_zero_and_says_so(loaded):
    for results in loaded:
        result = results["missing"]
        assert result["step"] == 77
        assert not any(view.any() for view in result["residuals"].values())
        assert any("residuals start at zero" in message for message in result["messages"])


@pytest.mark.parametrize("spoilt", list(REFUSED))
def test_what_does_not_fit_is_refused(loaded, spoilt):
    for results in loaded:
        assert REFUSED[spoilt] in results[spoilt]["error"]


def _save_none(rank, world_size, folder):
    _save(rank, world_size, folder, residual_checkpoint="none")
    return Path(folder, "megatron_sparse", f"rank_{rank:05d}.pt").stat().st_size


def _alone(rank, world_size, folder, empty):
    """One rank loads what two saved; then saves and loads without residuals."""
    moved = _load(rank, world_size, folder, {})
    size = _save_none(rank, world_size, empty)
    return moved, size, _load(rank, world_size, empty, {"residual_checkpoint": "none"})


@pytest.fixture(scope="module")
def alone(saved, tmp_path_factory):
    return run_ranks(_alone, 1, str(saved[0]), str(tmp_path_factory.mktemp("empty")))[0]


def test_another_data_parallel_size_preserves_the_total(saved, alone):
    result, held = alone[0], saved[1]
    for name in held[0]:
        assert torch.equal(result["residuals"][name], held[0][name] + held[1][name])
    assert any("data-parallel size was 2" in message for message in result["messages"])


def test_residual_checkpoint_none_keeps_the_step_and_drops_the_residual(alone):
    _, size, result = alone
    assert size < 10_000
    assert result["step"] == STEPS
    assert not any(view.any() for view in result["residuals"].values())
