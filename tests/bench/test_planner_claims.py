"""The planner against the virtual cluster's truth: near the best, never far over dense."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_sparse.bench.planner import cases
from megatron_sparse.bench.planner.command import Trial, sampled_profile
from megatron_sparse.bench.planner.row import PlannerRow, Verdict
from megatron_sparse.cli import main
from megatron_sparse.errors import ConfigError
from megatron_sparse.run.local_ranks import command_line, run_loopback
from megatron_sparse.sparsity.characteristics import profile_of
from megatron_sparse.sparsity.gradient_dump import GradientDumpWriter, Kind

NUMEL, FULL = 2**16, 2**24
ZEN_OWN = ("zen", "ssar_rd")
"""ZEN's theorem 1 leaves the choice between Balanced Parallelism and Hierarchical Centralization;
dense is always a candidate."""


def rows(kinds, world_sizes, clusters, schemes=None):
    workloads = cases.synthetic(kinds, NUMEL)
    return list(Trial(workloads, world_sizes, clusters, schemes, FULL).rows())


def test_five_kinds_on_three_clusters():
    """All cases of the bench, on few ranks; the command runs them on up to 64."""
    found = rows(cases.QUICK_KINDS, (2, 4), cases.CLUSTERS)
    assert len(found) == 30
    verdict = Verdict.of(found)
    assert verdict.holds, "\n".join([verdict.line(), *(row.line() for row in found)])
    assert len({row.chosen for row in found}) > 1, "one scheme for everything is no choice"


class TestZen:
    """The cases that ZEN names, among its own schemes."""

    def test_balanced_parallelism_for_embeddings(self):
        (row,) = rows(["embedding_nmt"], (16,), ["ethernet_25gbit"], ZEN_OWN)
        assert row.chosen == row.best == "zen"

    def test_hierarchical_centralization_where_tensors_hardly_overlap(self):
        """Batch size 1, 8 ranks, density 0.1 %."""
        (row,) = rows(["disjoint"], (8,), ["ethernet_25gbit"], ZEN_OWN)
        assert row.chosen == row.best == "ssar_rd"

    def test_dense_at_high_density(self):
        (row,) = rows(["uniform_90"], (16,), ["ethernet_25gbit"], ZEN_OWN)
        assert row.chosen == row.best == "dense"


def test_a_recording_is_tried_on_its_largest_sparse_bucket(tmp_path):
    generator = torch.Generator().manual_seed(0)
    positions = torch.randperm(NUMEL, generator=generator)
    for rank in range(4):
        writer = GradientDumpWriter(tmp_path / "run", [7], rank=rank, world_size=4)
        embedding = torch.zeros(NUMEL)
        embedding[positions[: NUMEL // 50]] = 1.0 + rank
        writer.write("embedding", 7, Kind.GRADIENT, embedding)
        writer.write("small", 7, Kind.GRADIENT, torch.zeros(64))
        writer.write("layer", 7, Kind.GRADIENT, torch.ones(2 * NUMEL))
    (workload,) = cases.recorded(tmp_path / "run")
    assert (workload.numel, workload.most_ranks) == (NUMEL, 4)
    gradient = workload.gradients(4)[3]
    assert gradient.count_nonzero() == NUMEL // 50
    assert gradient.max() == 4
    found = list(Trial([workload], (2, 4, 8), ("ethernet_25gbit",), None, FULL).rows())
    assert [row.world_size for row in found] == [2, 4]
    assert Verdict.of(found).holds, "\n".join(row.line() for row in found)


def test_the_planner_sees_a_sample():
    gradients = cases.synthetic(["skewed"], 2**20)[0].gradients(4)
    seen, exact = sampled_profile(gradients), profile_of(gradients)
    assert seen != exact
    assert seen.density == pytest.approx(exact.density)
    # The sample is a quarter of the bucket; most elements lie in a small part of it.
    assert seen.sum_density(4) == pytest.approx(exact.sum_density(4), rel=0.1)


def row(chosen_us, best_us, dense_us):
    predictions = {"dense": 2.0, "direct": 1.0, "agsparse": 3.0}
    taken = {"dense": dense_us, "direct": chosen_us, "agsparse": best_us}
    return PlannerRow.of(
        predictions,
        taken,
        case="k",
        world_size=2,
        cluster="c",
        numel=8,
        density=0.1,
        modelled=True,
    )


def test_a_row_and_the_verdict():
    near, far = row(104.0, 100.0, 120.0), row(107.0, 100.0, 120.0)
    assert (near.chosen, near.best, near.dense_us) == ("direct", "agsparse", 120.0)
    assert near.regret == pytest.approx(0.04)
    assert Verdict.of([near] * 19 + [far]).holds
    assert not Verdict.of([near] * 18 + [far]).holds
    over = row(106.0, 100.5, 100.9)
    assert over.over_dense > 1.05
    assert not Verdict.of([near] * 99 + [over]).holds
    assert "FAILS" in Verdict.of([over]).line()


def test_the_command(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    arguments = [
        "bench",
        "planner",
        "--kinds",
        "uniform,uniform_50",
        "--ranks",
        "2",
        "--clusters",
        "ethernet_25gbit",
        "--schemes",
        "direct",
        "--simulated-bytes",
        "256K",
        "--json",
        str(out),
    ]
    with pytest.raises(SystemExit) as end:
        main.main(arguments)
    assert not end.value.code
    printed = capsys.readouterr().out
    assert "MODELLED" in printed
    assert "100.0% of 2 cases" in printed
    written = [json.loads(line) for line in out.read_text().splitlines()]
    keys = {"case", "world_size", "cluster", "chosen", "chosen_us", "best", "best_us", "dense_us"}
    assert all(row.keys() >= keys and row["modelled"] for row in written)


def test_it_fails_when_the_claim_does(monkeypatch, capsys):
    """A planner that ignores prices and takes the worst scheme."""
    from megatron_sparse.bench.planner import command as planner

    monkeypatch.setattr(planner, "prices_us", lambda *_, **__: {"dense": 2.0, "sparse_ps": 1.0})
    with pytest.raises(SystemExit) as end:
        main.main(
            [
                "bench",
                "planner",
                "--kinds",
                "uniform_50",
                "--ranks",
                "4",
                "--clusters",
                "ethernet_25gbit",
                "--simulated-bytes",
                "256K",
            ]
        )
    assert end.value.code == 1
    assert "FAILS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--kinds", "magic"), "unknown"),
        (("--ranks", "1"), "--ranks"),
        (("--op", "x"), "--op"),
        (("--clusters", "mars"), "--clusters"),
        (("--schemes", "x"), "planner.schemes"),
        (("--recording", "nowhere"), "no gradient dump"),
    ],
)
def test_wrong_arguments_are_one_error(capsys, arguments, word):
    with pytest.raises(SystemExit) as end:
        main.main(["bench", "planner", *arguments])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1
    assert word in error


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="kind of gradients"):
        cases.synthetic(["magic"], 2**16)


@pytest.mark.slow
def test_between_real_ranks(tmp_path):
    """Links and schemes are measured. The claim is not checked, because other tests run too."""
    out = tmp_path / "rows.jsonl"
    command = command_line(
        [
            "bench",
            "planner",
            "--kinds=uniform,disjoint",
            "--bucket-bytes=256K",
            "--schemes=direct,agsparse",
            "--iters=3",
            "--warmup=1",
            f"--json={out}",
        ]
    )
    assert run_loopback(command, 2) in (0, 1)
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"] for row in written] == ["uniform", "disjoint"]
    for row in written:
        assert not row["modelled"]
        assert set(row["taken_us"]) == set(row["predictions_us"]) == {"dense", "direct", "agsparse"}
        assert min(row["taken_us"].values()) == row["best_us"] > 0
