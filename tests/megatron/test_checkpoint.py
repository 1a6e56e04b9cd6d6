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


def test_the_same_size_gives_every_rank_its_own_back_whatever_the_buckets(saved):
    folder, held = saved
    results = run_ranks(_load, 2, str(folder), {"bucket_size": None})
    for result, own in zip(results, held, strict=True):
        assert result["step"] == STEPS
        assert result["residuals"].keys() == own.keys()
        assert all(torch.equal(result["residuals"][name], own[name]) for name in own)
        assert result["goes on"] is True


def test_another_data_parallel_size_preserves_the_total(saved):
    folder, held = saved
    (result,) = run_ranks(_load, 1, str(folder), {})
    for name in held[0]:
        assert torch.equal(result["residuals"][name], held[0][name] + held[1][name])
    assert any("data-parallel size was 2" in message for message in result["messages"])


def test_a_missing_rank_starts_every_rank_at_zero_and_says_so(saved, tmp_path):
    folder, _ = saved
    (_copy(folder, tmp_path) / "rank_00001.pt").unlink()
    for result in run_ranks(_load, 2, str(tmp_path), {}):
        assert result["step"] == 77
        assert not any(view.any() for view in result["residuals"].values())
        assert any("residuals start at zero" in message for message in result["messages"])


def _rewritten(folder, target, change):
    for path in _copy(folder, target).iterdir():
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)
    return str(target)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s["place"].update(tensor_size=2), "another model-parallel layout"),
        (lambda s: s.update(version=99), "written by another version"),
        (lambda s: s["residuals"].update({n: v[:-1] for n, v in s["residuals"].items()}),
         "does not fit"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(saved, tmp_path, change, expected):
    folder = _rewritten(saved[0], tmp_path, change)
    for result in run_ranks(_load, 2, folder, {}):
        assert expected in result["error"]


def test_a_damaged_file_is_refused(saved, tmp_path):
    for path in _copy(saved[0], tmp_path).iterdir():
        path.write_bytes(path.read_bytes()[:100])
    for result in run_ranks(_load, 2, str(tmp_path), {}):
        assert "is damaged" in result["error"]


def _save_none(rank, world_size, folder):
    _save(rank, world_size, folder, residual_checkpoint="none")
    return Path(folder, "megatron_sparse", f"rank_{rank:05d}.pt").stat().st_size


def test_residual_checkpoint_none_keeps_the_step_and_drops_the_residual(tmp_path):
    (size,) = run_ranks(_save_none, 1, str(tmp_path))
    assert size < 10_000
    (result,) = run_ranks(_load, 1, str(tmp_path), {"residual_checkpoint": "none"})
    assert result["step"] == STEPS
    assert not any(view.any() for view in result["residuals"].values())
