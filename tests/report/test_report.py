"""`megatron-sparse report`: the page of a run, and errors for other folders."""

import csv
import json
import re
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron_sparse.report import charts, page, tables
from megatron_sparse.report.run_data import WINDOW, load_run
from tests import commands
from tests.commands import refused
from tests.report_runs import make_run

MOST_BYTES = 6 * 2**20


class Reader(HTMLParser):
    """Tags, addresses, ids and words of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "srcset", "data"):
                self.addresses.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_data(self, data):
        self.words.append(data)


def report(folder: Path, *runs: Path) -> str:
    output = folder / "out" / "report.html"
    assert page.run(list(runs), [output]) == [output]
    return output.read_text()


def sentences(*runs: Path) -> str:
    """The page without its charts, because drawing takes time."""
    loaded = [load_run(folder, index) for index, folder in enumerate(runs)]
    sections = page.sections_of(loaded)
    said = [gap for one in loaded for gap in one.gaps]
    said += [section.absent for section in sections]
    rows = chain.from_iterable(section.charts for section in sections)
    return " ".join(said + [chart.note for chart in chain.from_iterable(rows)])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "one", "one")


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_run(tmp_path / "run", "run")


@pytest.fixture(scope="module")
def two_runs(run, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("two")
    return report(folder, run, make_run(folder / "other", "other", density=0.05))


def cells(table: tables.Table) -> dict[str, list[str]]:
    return {row[0]: list(row[1:]) for row in table.rows}


def test_the_page_stands_alone(two_runs):
    text = two_runs
    read = Reader(text)
    assert len(text) < MOST_BYTES
    assert "script" not in read.tags
    assert all(address.startswith(("#", "data:,")) for address in read.addresses)
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert "default-src 'none'" in text
    assert len(read.ids) == len(set(read.ids)), "two charts share an id"
    for target in re.findall(r'(?:url\(|href=")#([^")]+)', text):
        assert target in read.ids, "a link or a clip path leads nowhere"
    assert read.tags.count("svg") == read.tags.count("figure") == 8


def test_text_of_users_is_text(tmp_path):
    """In the page and in charts (a title holds the name); `$` does not start mathematics."""
    evil = "<script>alert(1)</script>$x_{$ _y"
    a = make_run(tmp_path / "a", evil, config={"note": "</pre><img src=x onerror=alert(1)>"})
    plan = json.loads((a / "plan.json").read_text())
    plan["buckets"][0]["reason"] = "<b onclick=alert(1)>because</b>"
    (a / "plan.json").write_text(json.dumps(plan))
    b = make_run(tmp_path / "b", "_hidden")
    text = report(tmp_path, a, b)
    read = Reader(text)
    assert not {"script", "img"} & set(read.tags)
    assert not re.search(r"<[^>]*\son\w+=", text)
    words = " ".join(read.words)
    assert evil in words
    assert "<b onclick=alert(1)>because</b>" in words
    assert "B: _hidden" in words, "the legend leaves no run out"


def test_secrets_of_the_configuration_are_hidden(tmp_path):
    folder = make_run(
        tmp_path / "run", "run", config={"cluster": {"env": {"WANDB_API_KEY": "abc123"}}}
    )
    data = load_run(folder, 0)
    assert data.config["cluster.env.WANDB_API_KEY"] == "***"
    assert "abc123" not in str(data)


def test_numbers_of_the_summary(run, tmp_path):
    other = make_run(tmp_path / "other", "other", density=0.05)
    runs = [load_run(run, 0), load_run(other, 1)]
    table = cells(tables.summary_table(runs))
    assert table["iterations"] == ["12", "12"]
    assert (table["first loss"], table["last loss"]) == (["9.0000"] * 2, ["0.7500"] * 2)
    assert table["target density"] == ["1.00%", "5.00%"]
    assert table["reached in iteration"] == ["3", "3"]
    # 3 buckets of 12,000 and 60,000 bytes against 600,000, at the target.
    assert table["bytes sent / dense"] == ["2.00%", "10.00%"]
    assert table["density sent"] == ["1.00%", "5.00%"]
    assert table["schemes at the end"] == ["direct x 3"] * 2
    assert table["exposed, mean ms"] == ["10.00 of 100.00 ms"] * 2
    assert table["exposed / iteration"] == ["10.00%", "10.00%"]
    assert table["throughput"] == ["-", "-"]
    assert table["memory of the plugin"] == ["residual 390.62 KiB"] * 2


def test_gathers_of_parameters_are_shown_beside_gradients(run, tmp_path):
    gathered = make_run(tmp_path / "gathered", "gathered", iterations=12, gathers=True)
    table = cells(tables.summary_table([load_run(gathered, 0), load_run(run, 1)]))
    # 2 iterations raw, 10 exact.
    assert table["parameters sent, whole run"] == ["1.53 MiB of 3.43 MiB (44.44%)", "-"]
    # Gradients: 3 buckets of 600,000 bytes twice, then 3 of 12,000 ten times.
    all_bytes = (2 * 1_800_000 + 10 * 36_000 + 1_600_000) / (12 * 1_800_000 + 3_600_000)
    assert load_run(gathered, 0).summary["total_wire_ratio"] == pytest.approx(all_bytes)
    assert table["exposed, mean ms"][0] == "14.00 of 100.00 ms (gradients 10.00, parameters 4.00)"
    assert table["exposed / iteration"] == ["14.00%", "10.00%"]
    assert "with parameters / dense" not in cells(tables.summary_table([load_run(run, 0)]))


def test_runs_are_shown_in_the_order_in_which_they_are_named(run, tmp_path):
    runs, output = tmp_path / "runs", tmp_path / "report.html"
    _, baseline = [make_run(runs / name, name, iterations=3) for name in ("b", "c")]
    assert commands.run("report", baseline, runs, run, "--output", output) == 0
    page_text = output.read_text()
    assert page_text.index("A: c") < page_text.index("B: b") < page_text.index("C: one")
    assert "D: " not in page_text


def test_charts_of_several_runs_share_their_scales(run, tmp_path):
    slow = make_run(tmp_path / "slow", "slow", iterations=20, buckets=6)
    runs = [load_run(run, 0), load_run(slow, 1)]
    found = charts_of(*runs)
    for kind in ("breakdown", "buckets"):
        first, second = (drawn_axes(found[f"{kind}-{key}"]) for key in "ab")
        assert first.get_xlim() == pytest.approx(second.get_xlim()), kind
        assert first.get_ylim() == pytest.approx(second.get_ylim()), kind
        assert found[f"{kind}-a"].height_in == found[f"{kind}-b"].height_in


def test_a_line_marks_where_the_target_density_begins(run, tmp_path):
    """In iteration 3; a run that leaves nothing out has no target."""
    dense = make_run(tmp_path / "dense", "dense", density=1.0)
    runs = [load_run(run, 0), load_run(dense, 1)]
    found = charts_of(*runs)
    for name, marks in {"loss": 1, "breakdown-a": 1, "breakdown-b": 0}.items():
        lines = [list(line.get_xdata()) for line in drawn_axes(found[name]).lines]
        assert lines.count([2.5, 2.5]) == marks, name


def charts_of(*runs):
    rows = chain.from_iterable(section.charts for section in page.sections_of(runs))
    return {chart.name: chart for chart in chain.from_iterable(rows)}


def drawn_axes(chart):
    axes = Figure().subplots()
    chart.draw(axes)
    return axes


def test_a_run_without_compression_asked_for_no_density(tmp_path):
    """Its configuration has a density, which does not apply."""
    folder = make_run(tmp_path / "dense", "dense", iterations=2)
    before = (folder / "breakdown.jsonl").read_text()
    for text, asked in ((before, "1.00%"), (before.replace('"warmup"', '"off"'), "-")):
        (folder / "breakdown.jsonl").write_text(text)
        data = load_run(folder, 0)
        assert cells(tables.summary_table([data]))["target density"] == [asked]


def test_a_stage_that_took_no_time_is_not_in_the_legend(run):
    drawn = charts_of(load_run(run, 0))["buckets"].svg()
    words = set(re.findall(r">([a-z_]+)</text>", drawn))
    assert words == {"ms", "prune", "network"}


def test_numbers_of_the_buckets(run):
    data = load_run(run, 0)
    assert cells(tables.bucket_table(data, [data]))["group1.0"] == [
        "100,000",
        "direct",
        "1.00%",
        "11.72 KiB",
        "3.33",
        "1.00",
        "4.30",
        "4.30",
        "direct 1000 us, dense 5000 us",
    ]
    phases = cells(tables.phase_table(data, [data]))
    assert phases["warmup"][0] == "2"
    assert phases["target"][3:5] == ["2.00%", "1.00%"]


def test_numbers_of_stragglers(run):
    data = load_run(run, 0)
    # 10 steps of 3 buckets; rank 1 comes 2 ms after the last of the others.
    delays = cells(tables.straggler_table([data]))
    assert delays["one"] == ["30", "2.00", "2.00", "2.00", "1", "100.00%", "100.00%"]
    assert delays["group1.0"] == ["10", "2.00", "2.00", "2.00", "1", "100.00%", "100.00%"]
    assert len(cells(tables.straggler_table([data, data]))) == 1


def test_only_what_differs_is_listed(tmp_path):
    runs = [
        load_run(make_run(tmp_path / name, name, config=config), index)
        for index, (name, config) in enumerate(
            [("a", {"leak": 1.0, "seed": 1}), ("b", {"leak": 0.9, "seed": 1}), ("c", {"seed": 1})]
        )
    ]
    assert cells(tables.difference_table(runs)) == {"leak": ["1.0", "0.9", "-"]}
    alike = tables.difference_table(runs[:1] * 2)
    assert (alike.rows, alike.note) == ([], "Nothing differs.")


def test_medians_are_of_the_end_of_the_run_with_its_last_scheme(run):
    (bucket, *_) = load_run(run, 0).buckets.values()
    assert (bucket.scheme, bucket.count) == ("direct", 10)
    assert bucket.stage_us["network"] == 2000
    assert WINDOW > 10


class TestGaps:
    """The page names missing parts; everything else is shown."""

    def test_a_run_that_has_not_ended(self, tmp_path):
        folder = make_run(tmp_path / "run", "run", ends=False, plan=False, delays=False)
        data = load_run(folder, 0)
        assert data.summary["iterations"] == 12
        gaps = " ".join(data.gaps)
        assert "has not ended" in gaps
        assert "plan.json is missing" in gaps
        text = sentences(folder)
        for sentence in ("has not ended", "mode=observe"):
            assert sentence in text

    def test_damaged_lines(self, folder):
        for name in ("breakdown.jsonl", "buckets.jsonl"):
            lines = (folder / name).read_text().splitlines(keepends=True)
            (folder / name).write_text("".join([lines[0], "{half\n", *lines[2:], '{"iterat']))
        data = load_run(folder, 0)
        assert data.summary["iterations"] == 11
        assert "breakdown.jsonl: damaged lines are left out: 2, the first is 2" in data.gaps
        assert "buckets.jsonl: damaged lines are left out: 2, the first is 2" in data.gaps

    @pytest.mark.parametrize("name", ["summary.json", "plan.json", "config.yaml"])
    @pytest.mark.parametrize("content", ["", "[1", "- a\n- b\n", "7"])
    def test_a_damaged_file(self, name, content, folder):
        (folder / name).write_text(content)
        assert any(name in gap for gap in load_run(folder, 0).gaps)

    def test_a_missing_file(self, folder):
        for name in ("buckets.jsonl", "config.yaml"):
            (folder / name).unlink()
        text = sentences(folder)
        assert "No times for buckets" in text
        assert "the run's configuration is unknown" in text

    def test_no_finite_loss_and_one_rank(self, tmp_path):
        folder = make_run(tmp_path / "run", "run", iterations=1, plan=False, delays=False)
        lines = [json.loads(line) for line in (folder / "breakdown.jsonl").open()]
        changed = [line | {"loss": None, "dense_bytes": 0, "wire_bytes": 0} for line in lines]
        (folder / "breakdown.jsonl").write_text("".join(json.dumps(x) + "\n" for x in changed))
        text = report(tmp_path, folder)
        assert "No finite loss." in text
        assert "A run of one rank sends nothing." in text


class TestMistakes:
    """Folders without iterations, and places that cannot be written; more in `test_mistakes`."""

    def test_no_iteration(self, folder, capsys):
        (folder / "breakdown.jsonl").write_text("")
        assert "an empty file" in refused(capsys, "report", folder)
        (folder / "breakdown.jsonl").write_text("{no\n" * 7)
        err = refused(capsys, "report", folder)
        assert "damaged lines are left out: 7, the first is 1" in err

    def test_lines_of_another_version(self, folder, capsys):
        for name in ("breakdown.jsonl", "buckets.jsonl"):
            kept = (folder / name).read_text()
            (folder / name).write_text('{"iteration": 12}\n')
            said = f"{name} was not written by this version"
            assert said in refused(capsys, "report", folder)
            (folder / name).write_text(kept)


def test_the_command_writes_page_and_table(run, tmp_path, capsys, monkeypatch):
    """Each by its ending, in any case of letters; without a name the page alone."""
    page_file, table = tmp_path / "deep" / "r.HTML", tmp_path / "other" / "r.CSV"
    assert commands.run("report", run, "--output", page_file, "--output", table) == 0
    assert capsys.readouterr().out == f"{page_file}\n{table}\n"
    assert page_file.read_text().startswith("<!doctype html>")
    assert table.read_text().startswith("run,")
    monkeypatch.chdir(tmp_path)
    assert commands.run("report", run) == 0
    assert [path.name for path in tmp_path.glob("*.*")] == ["report.html"]


def test_a_csv_has_a_line_for_each_run_of_a_sweep(tmp_path, capsys):
    """More runs than a page has colours; one has no iteration yet."""
    names = [f"run_{index}_whose_name_goes_on_and_on" for index in range(page.MOST_RUNS + 1)]
    for index, name in enumerate(names):
        config = {"leak": 1 - index / 10, "training": {"iterations": 4 if index else 3}}
        make_run(tmp_path / "runs" / name, name, iterations=3, config=config)
    (tmp_path / "runs" / "begins").mkdir()
    (tmp_path / "runs" / "begins" / "breakdown.jsonl").touch()
    output = tmp_path / "sweep.csv"
    assert commands.run("report", tmp_path / "runs", "--output", output) == 0
    assert capsys.readouterr().out == f"{output}\n"
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == names
    assert [row["leak"] for row in rows[:3]] == ["1.0", "0.9", "0.8"]
    assert [row["iterations"] for row in rows[:2]] == ["3", "3 of 4"]
    assert {row["last loss"] for row in rows} == {"3.0000"}
    said = refused(capsys, "report", tmp_path / "runs")
    assert "too many runs" in said
    assert "1 to 8 folders" in said


def test_a_long_run_is_thinned(tmp_path):
    x = np.arange(1.0, 100_001.0)
    thin_x, thin_y = charts.thinned(x, np.where(x % 2 == 0, np.nan, x))
    assert len(thin_x) == len(thin_y) == charts.MOST_POINTS
    assert thin_x[0] == pytest.approx(250.5)  # the mean of 1 ... 500
    assert thin_y[0] == pytest.approx(250)  # of 1, 3, ..., 499
    assert "up to 500 iterations" in charts.thinned_note([100_000, 10])
    assert charts.thinned_note([charts.MOST_POINTS]) == ""


def test_many_buckets(tmp_path):
    """The slowest ones are shown, in the order of launch, and the rest is counted."""
    count = tables.MOST_BUCKETS + 5
    data = load_run(make_run(tmp_path / "run", "run", buckets=count, iterations=3), 0)
    table = tables.bucket_table(data, [data])
    assert [row[0] for row in table.rows] == [f"group{i}.0" for i in range(5, count)]
    assert "5 faster buckets are left out" in table.note
    assert f"The 16 slowest of {count} buckets" in sentences(tmp_path / "run")
    assert charts_of(data)["buckets"].svg().startswith("<svg")


def test_a_summary_of_an_earlier_end_is_told(folder):
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"iterations": 7}))
    assert any("has gone on since" in gap for gap in load_run(folder, 0).gaps)
