"""Exposed communication on a report's first screen: how much, where, and since when."""

from dataclasses import replace

import pytest

from megatron_sparse.report import page
from megatron_sparse.report.run_data import load_run
from tests.report_runs import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_run(make_run(tmp_path_factory.mktemp("runs") / "one", "one"), 0)


def first_section(*runs):
    first = page.sections_of(runs)[0]
    assert first.name == "exposed"
    return first


def test_how_much_and_where(run):
    """Two of three buckets are named, and the parameters as if they were one."""
    waits_us = {"group0.0": 1000.0, "group1.0": 0.0, "group2.0": 3000.0}
    buckets = {name: replace(run.buckets[name], exposed_us=us) for name, us in waits_us.items()}
    summary = dict(run.summary, tokens_per_s=2048.0)
    (text,) = first_section(replace(run, buckets=buckets, summary=summary)).lead
    assert (
        "10.00% of an iteration is exposed communication: 10.00 of 100.00 ms, "
        "means of 10 iterations at the target density." in text
    )
    assert "The longest waits are for group2.0 (75%) and group0.0 (25%)." in text
    assert "Throughput: 2,048 tokens/s." in text
    stage_ms = run.summary["phases"]["target"]["stage_ms_mean"] | {"param_wait": 16.0}
    target = run.summary["phases"]["target"] | {"stage_ms_mean": stage_ms}
    gathered = dict(summary, phases={"target": target})
    (text,) = first_section(replace(run, buckets=buckets, summary=gathered)).lead
    assert "The longest waits are for parameters (80%) and group2.0 (15%)." in text


def test_since_when(run, tmp_path):
    def names(*runs):
        return [[chart.name for chart in row] for row in first_section(*runs).charts]

    lines = ["exposed-share", "iteration-time"]
    assert names(run) == [lines, ["breakdown"]]
    assert "other" in first_section(run).charts[1][0].svg(), "the parts add up to the iteration"
    other = load_run(make_run(tmp_path / "two", "two"), 1)
    assert names(run, other) == [lines, ["breakdown-a", "breakdown-b"]]
