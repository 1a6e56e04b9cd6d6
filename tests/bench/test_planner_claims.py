"""The planner against the virtual cluster's truth: near the best, never far over dense."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.bench.exchange import planner
from megatron_sparse.bench.exchange import planner_cases as cases
from megatron_sparse.bench.exchange.options import CLUSTERS, PlannerOptions
from megatron_sparse.bench.exchange.planner import (
    PlannerRow,
    Verdict,
    errors_of,
    sampled_profile,
    virtual_rows,
)
from megatron_sparse.sparsity.characteristics import profile_of
from megatron_sparse.sparsity.gradient_dump import GradientDumpWriter, Kind
from tests.bench.running import read_rows, run_cli, run_loopback

NUMEL, FULL = 2**16, 2**24
ZEN_OWN = ("zen", "ssar_rd")
"""ZEN's theorem 1 leaves the choice between Balanced Parallelism and Hierarchical Centralization;
dense is always a candidate."""


def of_workloads(workloads, ranks, clusters, schemes=None):
    given = {"ranks": ranks, "clusters": clusters, "schemes": schemes}
    return list(virtual_rows(PlannerOptions(bucket_bytes=4 * FULL, **given), workloads))


def rows(kinds, *where):
    return of_workloads(cases.synthetic(kinds, NUMEL), *where)


def test_five_kinds_on_three_clusters():
    """All cases of the bench, on few ranks; the command runs them on up to 64."""
    found = rows(cases.QUICK_KINDS, (2, 4), CLUSTERS)
    assert len(found) == 30
    verdict = Verdict(found)
    assert verdict.holds, "\n".join([verdict.line(), *(row.line() for row in found)])
    assert len({row.chosen for row in found}) > 1, "one scheme for everything is no choice"
    errors = errors_of(found)
    for scheme in ("direct", "zen", "dense", "sparse_ring"):
        mean_error = sum(map(abs, errors[scheme])) / len(errors[scheme])
        # The full bench has means below 10 % for each scheme; these are few cases.
        assert mean_error < 0.2, scheme


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
    found = of_workloads([workload], (2, 4, 8), ["ethernet_25gbit"])
    assert [row.world_size for row in found] == [2, 4]
    assert Verdict(found).holds, "\n".join(row.line() for row in found)


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
    assert Verdict([near] * 19 + [far]).holds
    assert not Verdict([near] * 18 + [far]).holds
    over = row(106.0, 100.5, 100.9)
    assert over.over_dense > 1.05
    assert not Verdict([near] * 99 + [over]).holds
    assert "FAILS" in Verdict([over]).line()


def test_errors_are_those_of_the_predictions():
    errors = errors_of([row(100.0, 50.0, 120.0), row(200.0, 50.0, 100.0)])
    assert set(errors) == {"dense", "direct", "agsparse"}
    assert errors["direct"] == pytest.approx([1 / 100 - 1, 1 / 200 - 1])
    assert errors["dense"] == pytest.approx([2 / 120 - 1, 2 / 100 - 1])


SMALL = ["--clusters=ethernet_25gbit", "--simulated-bytes=256K"]


def test_the_command(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    chosen = ["--kinds=uniform,uniform_50", "--ranks=2", "--schemes=direct"]
    assert run_cli("planner", *chosen, *SMALL, f"--json={out}") == 0
    printed = capsys.readouterr().out
    assert "MODELLED" in printed
    assert "100.0% of 2 cases" in printed
    assert "predictions' mean error" in printed
    keys = {"case", "world_size", "cluster", "chosen", "chosen_us", "best", "best_us", "dense_us"}
    assert all(row.keys() >= keys and row["modelled"] for row in read_rows(out))


def test_it_fails_when_the_claim_does(monkeypatch, capsys):
    """A planner that ignores prices and takes the worst scheme."""
    monkeypatch.setattr(planner, "prices_us", lambda *_, **__: {"dense": 2.0, "sparse_ps": 1.0})
    assert run_cli("planner", "--kinds=uniform_50", "--ranks=4", *SMALL) == 1
    assert "FAILS" in capsys.readouterr().out


@pytest.mark.slow
def test_between_real_ranks(tmp_path):
    """Links and schemes are measured. The claim is not checked, because other tests run too."""
    out = tmp_path / "rows.jsonl"
    options = ["--kinds=uniform,disjoint", "--bucket-bytes=256K", "--schemes=direct,agsparse"]
    options += ["--iters=3", "--warmup=1", f"--json={out}"]
    assert run_loopback(2, "planner", *options) in (0, 1)
    written = read_rows(out)
    assert [row["case"] for row in written] == ["uniform", "disjoint"]
    for row in written:
        assert not row["modelled"]
        assert set(row["taken_us"]) == set(row["predictions_us"]) == {"dense", "direct", "agsparse"}
        assert min(row["taken_us"].values()) == row["best_us"] > 0
