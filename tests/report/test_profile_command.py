"""`megatron-sparse profile`: the table, the lines, the mistakes; and the examples."""

import runpy
import sys

import numpy as np
import pytest
import torch

from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.simulate import gradients as models
from megatron_sparse.sparsity.gradient_dump import GradientDump, GradientDumpWriter, Kind
from tests.commands import refused, run
from tests.overlaps import exact_profile
from tests.programs import ROOT
from tests.tracked import json_lines

RANKS = 4
MODELS = {
    "embedding": models.skewed(2**14, 0.02, row_numel=16),
    "others": models.uniform(2**12, 0.05),
}


def selection(gradient):
    """The largest 1 % of a gradient; zeros elsewhere."""
    kept_K = gradient.abs().topk(round(0.01 * gradient.numel())).indices
    return torch.zeros_like(gradient).index_copy_(0, kept_K, gradient[kept_K])


@pytest.fixture
def recorded(tmp_path):
    """Two iterations of two buckets on four ranks; the second has a selection, too."""
    folder = tmp_path / "recording"
    for rank in range(RANKS):
        writer = GradientDumpWriter(folder, [1, 5], rank=rank, world_size=RANKS)
        for name, model in MODELS.items():
            for iteration in (1, 5):
                gradient = model.gradient(10 * iteration + rank)
                writer.write(name, iteration, Kind.GRADIENT, gradient)
                writer.write(name, iteration, Kind.SELECTED, selection(gradient))
    return folder


def test_a_selection_of_later_iterations_is_found(recorded, capsys):
    for path in recorded.rglob("iteration-000001/**/*.selected.pt"):
        path.unlink()
    assert run("profile", recorded) == 0
    assert "selected gradients" in capsys.readouterr().out


def test_the_table_and_the_lines_have_the_recorded_values(recorded, tmp_path, capsys):
    assert run("profile", recorded, "--kind gradient --json", tmp_path / "p.jsonl") == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["embedding", "others", "all"]
    lines = json_lines(tmp_path / "p.jsonl")
    assert [(line["iteration"], line["bucket"]) for line in lines] == [
        (i, name) for i in (1, 5) for name in ("embedding", "others", "all")
    ]
    for line in lines:
        profile = SparsityProfile.from_dict(line["profile"])
        ranks = [10 * line["iteration"] + rank for rank in range(RANKS)]
        parts = {name: [model.gradient(rank) for rank in ranks] for name, model in MODELS.items()}
        whole = [torch.cat(pair) for pair in zip(*parts.values(), strict=True)]
        assert profile == exact_profile(parts.get(line["bucket"], whole))
    means = [line["profile"]["density"] for line in lines if line["bucket"] == "embedding"]
    assert f"{np.mean(means):.3%}" in out.splitlines()[2]


@pytest.mark.parametrize("arguments", ["", "--kind selected"])
def test_the_recorded_selections(recorded, tmp_path, arguments):
    assert run("profile", recorded, arguments, "--json", tmp_path / "p.jsonl") == 0
    for line in json_lines(tmp_path / "p.jsonl"):
        # To within an element of a bucket.
        assert line["profile"]["density"] == pytest.approx(0.01, abs=1 / 2**12)


def test_mistakes(recorded, capsys):
    error = refused(capsys, "profile", recorded, "--kind whole")
    for word in ("--kind", "gradient | selected"):
        assert word in error


def test_a_kind_of_tensor_that_was_not_recorded(tmp_path, capsys):
    GradientDumpWriter(tmp_path, [1]).write("b", 1, Kind.GRADIENT, torch.ones(8))
    assert "no selected gradients" in refused(capsys, "profile", tmp_path, "--kind selected")


@pytest.mark.parametrize(
    ("script", "embeddings"),
    [
        ("lstm_language_model", {"read", "guess"}),
        ("deepfm", {"factors", "linear"}),
        ("translation", {"source", "target"}),
    ],
)
def test_examples_record_naturally_sparse_gradients(script, embeddings, tmp_path, monkeypatch):
    """In this process: importing torch takes longer than the script."""
    path = ROOT / "examples" / "natural_sparsity" / f"{script}.py"
    monkeypatch.syspath_prepend(path.parent)
    options = ["--workers", "2", "--iterations", "2", "--record", "1", "--batch", "8"]
    monkeypatch.setattr(sys, "argv", [str(path), "--output", str(tmp_path), *options])
    with torch.random.fork_rng():
        runpy.run_path(str(path), run_name="__main__")
    dump = GradientDump(tmp_path)
    assert dump.iterations == [2]
    assert set(dump.buckets) == embeddings | {"others"}
    for name in embeddings:
        profile = exact_profile(dump.read(2, name))
        # A batch of eight touches few rows; workers share common words, and not all.
        assert 0 < profile.density < 0.05
        assert 1 < profile.densification[2] < 2
