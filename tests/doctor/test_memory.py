"""`doctor --memory`: the account of a run that has not started."""

from math import ceil
from typing import Any

import pytest

from megatron_sparse.config.model import ModelConfig
from megatron_sparse.config.run import RunConfig
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.doctor import memory
from megatron_sparse.doctor.memory import of_run
from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron.predicted_buckets import predicted_buckets, predicted_parameters
from megatron_sparse.reduction.level_choice import LevelChoice, choose_level
from megatron_sparse.reduction.memory import ITEMS
from megatron_sparse.run.composition import compose
from tests.commands import run
from tests.doctor.memory_page import PAGE, parts, table
from tests.tracked import json_lines

RUN = ("model=gpt2_xl", "data=mock", "cluster.ranks_per_node=8", "cluster.device=cuda")


def test_the_page_has_the_computed_numbers() -> None:
    """`python -m tests.doctor.memory_page` writes them anew."""
    assert parts(PAGE.read_text("utf-8"))[1] == table()


def test_the_page_describes_every_item() -> None:
    text = PAGE.read_text("utf-8")
    assert all(f"| `{item}` |" in text for item in ITEMS)


def test_parameters_by_hand() -> None:
    def count(num_layers: int = 1, megatron: dict[str, Any] | None = None, **fields: object) -> int:
        shape = {"hidden_size": 4, "num_attention_heads": 1, "seq_length": 8}
        model = ModelConfig(num_layers=num_layers, **shape, **fields)
        config = RunConfig(model=model, megatron=megatron or {})
        return sum(each.numel for each in predicted_parameters(config, 100))

    # embeddings 128 * 4 (100 padded) and 8 * 4; layer norms 2 * 8; qkv 4 * 12 + 12;
    # projection 4 * 4 + 4; MLP 2 * 4 * 16 + 16 + 4; last norm 8.
    assert count() == 512 + 32 + 16 + 60 + 20 + 148 + 8
    assert count(tied_embeddings=False) == count() + 512
    assert count(position_embedding_type="rope") == count() - 32
    assert count(4, {"hybrid_layer_pattern": "*-*-"}) == count(2)
    assert count(5, {"hybrid_layer_pattern": "*-*--"}) == count(2) + 8 + 148


def test_tensor_parallel_ranks_share_what_they_do_not_copy() -> None:
    """Twice a rank's own parameters are those of the model, where the copies are taken once."""
    pair = (*RUN, "cluster.ranks_per_node=2")
    one = compose(pair)
    two = compose([*pair, "model.num_attention_heads=20", "training.tensor_parallel=2"])
    parts_of = predicted_parameters(two, 50304)
    copied = sum(each.numel for each in parts_of if each.replicated)
    split = sum(each.numel for each in parts_of if not each.replicated)
    whole = sum(each.numel for each in predicted_parameters(one, 50304))
    # The vocabulary is padded to a multiple of 256 instead of 128 rows.
    padding = (-50304 % 256) * 1600
    assert 2 * split + copied == whole + padding


def test_bucket_sizes_are_megatron_s_by_default() -> None:
    for overrides, least in (((), 40_000_000), (("megatron.ddp_bucket_size=1000000",), 1_000_000)):
        buckets = predicted_buckets(compose([*RUN, *overrides, "training.precision=bf16"]), 50257)
        assert all(bucket.numel >= least for bucket in buckets[:-1])
        # The last parameter that a bucket takes may be large; all others fit below the limit.
        assert all(
            bucket.numel - (bucket.parameters[-1].stop - bucket.parameters[-1].start) < least
            for bucket in buckets
        )
    whole = compose([*RUN, "training.overlap_grad_reduce=false", "training.precision=bf16"])
    assert len(predicted_buckets(whole, 50257)) == 1


def test_the_rerun_mode_costs_as_much_as_the_residual() -> None:
    on = of_run(compose(RUN))
    off = of_run(compose([*RUN, "megatron.rerun_mode=disabled"]))
    assert on.nbytes["undo"] == on.nbytes["residual"] == 4 * on.parameters
    assert on.total - off.total == on.nbytes["undo"]
    fp16 = of_run(compose([*RUN, "megatron.rerun_mode=disabled", "training.precision=fp16"]))
    assert fp16.nbytes["undo"] == fp16.nbytes["residual"]


def test_the_command_shows_every_item(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    file = tmp_path / "memory.jsonl"
    assert run("doctor --memory", *RUN, "--json", file) == 0
    out = capsys.readouterr().out
    found = of_run(compose(RUN))
    for item in found.nbytes:
        assert ITEMS[item].purpose in out
    assert {row["item"]: row["bytes"] for row in json_lines(file)} == found.nbytes | {
        "total": found.total
    }


def test_exact_gathers_keep_the_own_shard_and_all_directions() -> None:
    exact = ["training.use_distributed_optimizer=true", "parameters.method=exact"]
    for precision, nbytes in (("bf16", 2), ("fp32", 4)):
        config = compose([*RUN, *exact, f"training.precision={precision}"])
        ranks = config.data_parallel
        shards = [each.numel // ranks for each in predicted_buckets(config, 50257)]
        bits = sum(ranks * ceil(shard / 32) * 32 for shard in shards)
        assert of_run(config).nbytes["parameters"] == nbytes * sum(shards) + bits // 8
    assert "parameters" not in of_run(compose([*RUN, exact[0]])).nbytes


def test_the_levels_of_the_models_own_buckets_are_priced(monkeypatch) -> None:
    """As in training: see `megatron.transports`."""
    priced = []

    def choose(config: SparseConfig, nodes: list[int], instances: int, shapes) -> LevelChoice:
        priced.append(shapes)
        return choose_level(config, nodes, instances, shapes)

    monkeypatch.setattr(memory, "choose_level", choose)
    config = compose([*RUN, "cluster.nodes=2", "compression.level=auto", "compression=topk99"])
    found = of_run(config)
    # Eight ranks of a node share its residual.
    assert found.nbytes["residual"] == pytest.approx(4 * found.parameters / 8, rel=0.01)
    (shapes,) = priced
    buckets = predicted_buckets(config, 50257)
    assert shapes.total() == len(buckets)
    assert {shape.numel for shape in shapes} == {bucket.numel for bucket in buckets}


def test_a_choice_by_price_is_named_and_no_other_scheme() -> None:
    assert not of_run(compose([*RUN, "scheme=zen"])).notes
    priced = of_run(compose([*RUN, "cluster=perlmutter", "cluster.device=cuda"]))
    assert any("planner.cluster" in note for note in priced.notes)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="without the plugin"):
        of_run(compose([*RUN, "plugin=false"]))
    with pytest.raises(ConfigError, match="undo=never"):
        of_run(compose([*RUN, "compression.undo=never"]))
