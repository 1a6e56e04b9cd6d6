"""Training with a plan by predicted time: its files, resuming, and pinned plans."""

from __future__ import annotations

import json

import pytest

from megatron_sparse.planner.plan_state import read_plan
from tests.megatron.checkpoint_cases import saved_object
from tests.megatron.test_pretrain import losses, train

PLANNED = (
    "scheme=auto",
    "planner.cluster=ethernet_25gbit",
    "planner.schemes=[direct,ssar_rd,zen]",
    "compression.warmup_iters=1",
    "compression.ramp_iters=0",
    "compression.density=0.02",
    "compression.value_bits=null",
    "training.save_interval=3",
)


@pytest.mark.slow
def test_a_planned_run_resumes_bit_exactly_and_its_plan_can_be_pinned(tmp_path):
    whole = train(tmp_path, "whole", *PLANNED)
    rows = read_plan(whole)
    lines = [json.loads(line) for line in (whole / "buckets.jsonl").open()]
    assert {line["bucket"] for line in lines} == set(rows)
    for line in lines:
        assert (line["predicted_us"] is None) == (line["phase"] == "warmup")
        assert line["measured_us"] > 0
    for row in rows.values():
        assert set(row["predicted_us"]) == {"dense", "direct", "ssar_rd", "zen"}
    assert any(row["chosen"] != "dense" for row in rows.values())
    assert any(row["profile"] for row in rows.values())
    part = train(tmp_path, "part", *PLANNED, "megatron.exit_interval=3")
    saved = saved_object(part, 3, "megatron_sparse.state.tp0.pp0/shard_0_2")
    assert set(saved["planner"]["buckets"]) == set(rows)
    train(tmp_path, "part", *PLANNED, "resume=must")
    assert losses(part) == losses(whole)
    assert read_plan(part) == rows
    pinned = train(tmp_path, "pinned", *PLANNED[4:], f"planner.pin={whole}")
    for line in map(json.loads, (pinned / "buckets.jsonl").open()):
        if line["phase"] == "target":
            assert line["scheme"] == rows[line["bucket"]]["chosen"]
