"""`megatron-sparse profile`: the table, the lines, the figures, the mistakes; and the examples."""

import csv
import runpy
import sys

import numpy as np
import pytest
import torch

from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.report import profile as profile_report
from megatron_sparse.simulate import gradients as models
from megatron_sparse.simulate import profiled
from megatron_sparse.sparsity.characteristics import largest
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
                writer.write(name, iteration, Kind.SELECTED, largest(gradient, 0.01))
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
    # Zipf's law: most lies in the first of four ranges; a hash spreads it.
    assert lines[0]["push"] > 2
    assert 1 <= lines[0]["push_hashed"] < 1.7
    means = [line["profile"]["density"] for line in lines if line["bucket"] == "embedding"]
    assert f"{np.mean(means):.3%}" in out.splitlines()[2]


@pytest.mark.parametrize(
    ("arguments", "density"), [("", 0.01), ("--kind selected", 0.01), ("--density 0.005", 0.005)]
)
def test_recorded_and_simulated_selections(recorded, tmp_path, arguments, density):
    assert run("profile", recorded, arguments, "--json", tmp_path / "p.jsonl") == 0
    for line in json_lines(tmp_path / "p.jsonl"):
        # To within an element of a bucket.
        assert line["profile"]["density"] == pytest.approx(density, abs=1 / 2**12)


def test_the_largest_elements_are_taken_and_zeros_never():
    gradient = torch.tensor([0.0, -3.0, 1.0, 2.0, 0.0, 0.0])
    expected = torch.tensor([0.0, -3.0, 0.0, 2.0, 0.0, 0.0])
    assert torch.equal(largest(gradient, 0.34), expected)
    assert torch.equal(largest(gradient, 1.0), gradient)
    assert torch.equal(largest(gradient.to_sparse(), 0.34), expected)


def test_the_figures_show_the_numbers_of_the_samples(recorded, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert run("profile", recorded, "--kind gradient --output", tmp_path / "f") == 0
    names = [f"zen-figure-{number}" for number in (2, 3, 8, 16, 17)]
    files = sorted(path.name for path in (tmp_path / "f").iterdir())
    assert files == sorted(f"{name}.{end}" for name in names for end in ("csv", "png"))
    rows = {name: list(csv.DictReader((tmp_path / "f" / f"{name}.csv").open())) for name in names}
    samples = list(profile_report.samples_of(GradientDump(recorded), Kind.GRADIENT))

    def of(name, panel, series):
        return [
            (row["x"], float(row["y"]))
            for row in rows[f"zen-figure-{name}"]
            if (row["panel"], row["series"]) == (panel, series)
        ]

    # Figure 2a is a probability density, over 25 bins.
    assert sum(y for _, y in of(2, "a", "embedding")) / 25 == pytest.approx(1, rel=1e-4)
    mine = [sample.profile for sample in samples if sample.bucket == "embedding"]
    expected = np.mean([profile.densification[4] for profile in mine])
    assert dict(of(2, "b", "embedding"))["4"] == pytest.approx(expected, rel=1e-4)
    assert sum(y for _, y in of(3, "a", "others")) == pytest.approx(100, rel=1e-4)
    expected = np.mean([profile.skewness[8] for profile in mine])
    assert dict(of(3, "b", "embedding"))["8"] == pytest.approx(expected, rel=1e-4)
    # Figure 8: counted bytes, and the bytes of the schemes' messages, headers included.
    times = {
        (row["series"], row["ranks"]): float(row["normalised_time"]) for row in rows["zen-figure-8"]
    }
    assert times["AllReduce", "4"] == 1
    counted = times["Balanced Parallelism in COO (counted)", "4"]
    assert 0.5 * counted < times["ZEN", "4"] < 2 * counted
    assert {ranks for _, ranks in times} == {"2", "4"}
    assert all(float(row["y"]) > 0 for row in rows["zen-figure-16"])
    # Figure 17: COO is twice the values; the bitmap of one partition is its elements' 1/32.
    sizes = {series: dict(of(17, "a", series)) for series in ("COO", "hash bitmap")}
    for density, size in sizes["COO"].items():
        assert size == pytest.approx(2 * float(density), rel=1e-4)
        assert sizes["hash bitmap"][density] == pytest.approx(float(density) + 1 / 32, rel=1e-4)
    contiguous, hashed = (
        of(17, "b", name)[0][1] for name in ("contiguous shards, COO", "Algorithm 1, COO")
    )
    assert contiguous < hashed


def test_a_large_bucket_is_thinned_evenly():
    elements = np.flatnonzero(models.skewed(2**20, 0.05).gradient(0).numpy())
    kept, numel = profiled.thinned(elements, 2**20, 2**18)
    assert numel == 2**18
    assert np.all(np.diff(kept) > 0)
    assert kept[-1] < numel
    # A quarter of the elements: 13,000, whose standard deviation is 1 %; the first piece is full.
    assert kept.size == pytest.approx(elements.size / 4, rel=0.05)
    same, whole = profiled.thinned(elements, 2**20, 2**20)
    assert same is elements
    assert whole == 2**20


def test_a_model_and_a_measurement_are_labelled_as_such(recorded):
    samples = list(profile_report.samples_of(GradientDump(recorded), Kind.GRADIENT))
    labels = {figure.number: figure.label for figure in profiled.figures(samples)}
    assert "model" in labels[8]
    assert "measured" in labels[16]
    assert all("recorded" in labels[number] for number in (2, 3, 17))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{} --kind whole", ["--kind", "gradient | selected"]),
        ("{} --density 0", ["--density"]),
        ("{} --density 0.1 --kind selected", ["--density selects from gradients"]),
        ("{} --output {}/iteration-000001/group-0-4/rank-0000/others.gradient.pt", ["--output"]),
    ],
)
def test_mistakes(recorded, capsys, arguments, words):
    error = refused(capsys, "profile", arguments.format(recorded, recorded))
    for word in words:
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
