"""Exposed communication on a report's first screen: how much, and where."""

import numpy as np
import pytest

from megatron_sparse.report import exposed, page
from megatron_sparse.report.exposed import ExposedTimes
from megatron_sparse.report.run_data import load_run
from tests.report_runs import make_run

SUMMARY = {
    "phases": {},
    "iterations": 50,
    "exposed_share": 0.25,
    "iteration_ms_mean": 100.0,
    "stage_ms_mean": {"host_wait": 20.0, "param_wait": 5.0},
    "tokens_per_s": 2048.0,
    "model_tflop_per_s": None,
    "world_size": 4,
}


def times(
    waits_ms: dict[str, list[float]],
    iteration_ms: float = 100.0,
    param_waits_ms: list[float] | None = None,
) -> ExposedTimes:
    """Of a run whose iteration i waited `waits_ms[bucket][i - 1]` for each bucket."""
    count = len(next(iter(waits_ms.values())))
    found = ExposedTimes(
        np.arange(1, count + 1), np.full(count, iteration_ms), np.array(param_waits_ms or [0.0])
    )
    for bucket, waits in waits_ms.items():
        for index, wait_ms in enumerate(waits):
            line = {"iteration": index + 1, "bucket": bucket, "exposed_us": wait_ms * 1e3}
            found.add(line)
    return found


class TestTimes:
    """The waits by bucket over the run."""

    @pytest.mark.parametrize(
        ("waits_ms", "param_waits_ms", "expected"),
        [
            ({"a": [10, 20], "b": [5, 0]}, None, {"a": [0.1, 0.2], "b": [0.05, 0.0]}),
            # Parameters are one area more.
            ({"a": [10, 20]}, [0, 8], {exposed.PARAMETERS: [0.0, 0.08], "a": [0.1, 0.2]}),
        ],
    )
    def test_shares_of_the_iteration(self, waits_ms, param_waits_ms, expected):
        shares = times(waits_ms, param_waits_ms=param_waits_ms).shares()
        assert {name: share.tolist() for name, share in shares.items()} == expected

    def test_long_runs_are_averaged_without_losing_time(self):
        many = times({"a": [10.0] * 700 + [40.0] * 300})
        (share,) = many.shares().values()
        assert len(share) == len(many.middle) == 200
        assert share[0] == pytest.approx(0.1)
        assert share[-1] == pytest.approx(0.4)
        assert share.mean() == pytest.approx(0.19)

    def test_a_line_of_an_iteration_that_was_cut_off_adds_nothing(self):
        found = times({"a": [10]})
        found.add({"iteration": 9, "bucket": "late", "exposed_us": 1.0})
        assert list(found.shares()) == ["a"]


class TestSentences:
    """The lead of the first section."""

    def said(self, waits_ms, **changed) -> str:
        return " ".join(exposed.sentences(SUMMARY | changed, times(waits_ms)))

    def test_how_much_and_where(self):
        text = self.said({"a": [10, 5, 5, 0], "b": [0, 15, 15, 30]})
        assert (
            "25.00% of an iteration is exposed communication: 25.00 of 100.00 ms "
            "(gradients 20.00, parameters 5.00), means of 50 iterations." in text
        )
        assert "The longest waits are for b (75%) and a (25%)." in text
        assert "Throughput: 2,048 tokens/s." in text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_run(make_run(tmp_path_factory.mktemp("runs") / "one", "one", buckets=8), 0)


def names(runs):
    first = page.sections_of(runs)[0]
    assert first.name == "exposed"
    return [chart.name for chart in first.charts]


def test_the_first_section_of_one_run(run):
    (first, *_) = page.sections_of([run])
    assert names([run]) == ["exposed", "breakdown", "iteration-time"]
    assert "10.00% of an iteration is exposed communication: 10.00 of 100.00 ms" in first.lead[0]
    svg = first.charts[0].svg()
    assert "other buckets" in svg
    assert svg.count("group") >= exposed.MOST_BUCKETS
    assert "other" in first.charts[1].svg(), "the parts add up to the iteration"


def test_several_runs_are_compared_first(run, tmp_path):
    other = load_run(make_run(tmp_path / "two", "two"), 1)
    assert names([run, other])[:3] == ["exposed-share", "iteration-time", "exposed-a"]
    assert names([run, other])[3:] == ["exposed-b", "breakdown-a", "breakdown-b"]


def test_without_times_of_buckets_the_share_alone_is_drawn(tmp_path):
    folder = make_run(tmp_path / "run", "run")
    (folder / "buckets.jsonl").unlink()
    assert names([load_run(folder, 0)]) == ["exposed-share", "breakdown", "iteration-time"]
