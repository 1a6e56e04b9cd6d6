"""`megatron-sparse plan`: tables, JSON lines, and refusals."""

import json
import re

from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.planner.plan import Planner
from tests import commands
from tests.planner.planned import a_bucket, a_planner
from tests.tracked import json_lines

KEYS = {"bucket", "numel", "density", "predicted_us", "chosen", "reason"}
FEW = ("--schemes", "direct,ssar_rd,agsparse")


def run(*arguments):
    return commands.run("plan", *map(str, arguments))


def test_buckets_by_size(tmp_path, capsys):
    out = tmp_path / "plan.jsonl"
    arguments = ("--bucket-bytes", "64K,16M", "--ranks", 4, "--cluster", "ethernet_25gbit")
    assert run(*arguments, "--density", 0.001, *FEW, "--json", out) == 0
    printed = capsys.readouterr().out
    rows = json_lines(out)
    assert [row["numel"] for row in rows] == [2**14, 2**22]
    for row in rows:
        assert row.keys() >= KEYS
        prices = row["predicted_us"]
        assert set(prices) == {"dense", "direct", "ssar_rd", "agsparse"}
        assert row["chosen"] == min(prices, key=prices.get)
        assert f"* {row['chosen']} " in " ".join(printed.split())
        assert row["density"] == 0.001
    assert rows[1]["chosen"] != "dense", "0.1 % of 16 MiB over 25 Gbit/s"
    assert "chosen: " in printed
    assert "assumed uniform" in printed


def test_the_least_density(tmp_path):
    """1 - (1 - d)^k is below d there, if it is rounded."""
    out = tmp_path / "plan.jsonl"
    arguments = ("--bucket-bytes", "8G", "--ranks", 3, "--cluster", "ethernet_25gbit", *FEW)
    assert run(*arguments, "--density", 1e-9, "--json", out) == 0
    assert json_lines(out)[0]["chosen"] != "dense"


def test_values_of_few_bits(tmp_path, capsys):
    arguments = ("--bucket-bytes", "64M", "--ranks", 4, "--cluster", "ethernet_25gbit", *FEW)
    rows = []
    for bits in ((), ("--value-bits", 2)):
        assert run(*arguments, *bits, "--json", tmp_path / "plan.jsonl") == 0
        rows += json_lines(tmp_path / "plan.jsonl")
    assert [row["value_bits"] for row in rows] == [None, 2]
    whole, narrow = (row["predicted_us"] for row in rows)
    assert narrow["agsparse"] < 0.7 * whole["agsparse"]
    assert narrow["dense"] == whole["dense"]


def test_a_run_as_recorded_and_on_another_cluster(tmp_path, capsys):
    planner = a_planner()
    written = [planner.report(a_bucket(name=name), 0) for name in ("a", "b")]
    (tmp_path / "plan.json").write_text(json.dumps({"step": 1, "buckets": written}))
    out = tmp_path / "out.jsonl"
    assert run(tmp_path, "--json", out) == 0
    assert json_lines(out) == json.loads(json.dumps(written))
    printed = capsys.readouterr().out
    assert "bucket a, b:" in printed, "what is alike is shown once"
    assert "2 buckets: " in printed
    assert run(tmp_path, "--cluster", "perlmutter", "--ranks", 8, *FEW, "--json", out) == 0
    there = json_lines(out)
    assert [row["world_size"] for row in there] == [8, 8]
    assert there[0]["predicted_us"]["dense"] != written[0]["predicted_us"]["dense"]


def test_a_run_without_a_cluster_file_has_the_bytes_in_its_reason(tmp_path, capsys):
    """Those of the density that was asked for, also where dense was chosen."""
    for density, chosen in ((0.01, "agsparse"), (0.9, "dense")):
        compression = CompressionConfig(density=density, warmup_iters=0, ramp_iters=0)
        row = Planner(compression, SchemeConfig()).report(a_bucket(name="a"), 0)
        (tmp_path / "plan.json").write_text(json.dumps({"step": 1, "buckets": [row]}))
        assert run(tmp_path) == 0
        words = " ".join(capsys.readouterr().out.split())
        assert f"density {density}" in words
        assert f"chosen: {chosen}: " in words
        assert re.search(r"\d+ B against dense 98304 B", words)
