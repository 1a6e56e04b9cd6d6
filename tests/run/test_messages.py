"""What a mistake in an argument or an option is answered with: the thing that was meant."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse import SparseConfig
from megatron_sparse.errors import ConfigError, HostError
from megatron_sparse.run import application, preparation
from megatron_sparse.run.composition import compose

MEANT = {
    "--multi-run": "did you mean --multirun?",
    "--density": "did you mean compression.density=VALUE?",
    "compression.density=1%": "write 0.01",
    "compression.value_bits=5": "auto | 8 | 4 | 3 | 2 | null",
    "scheme=ringallreduce": "did you mean adaptive_ring or dense_ring or sparse_ring?",
    "scheme=omnireduc": "did you mean omnireduce?",
    "preset=safe,balanced": "got:      preset=safe,balanced",
    "megatron.split=949,50,1": "quote it: 'megatron.split=\"949,50,1\"'",
}


@pytest.mark.parametrize("said", MEANT)
def test_a_mistake_on_the_command_line(said):
    with pytest.raises(ConfigError) as refused:
        application.train(["data=mock", said])
    assert MEANT[said] in str(refused.value)
    assert "***" not in str(refused.value)


OPTIONS = {
    "densty": ({"densty": 0.1}, "expected: density?"),
    "a dict": ({"parameters": {"method": "exact"}}, "a ParametersConfig"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_mistake_in_an_option(case):
    options, said = OPTIONS[case]
    with pytest.raises(ConfigError) as refused:
        SparseConfig.from_overrides(**options)
    assert said in str(refused.value)


def test_a_section_is_no_dict():
    with pytest.raises(ConfigError, match=r"write CompressionConfig\(\.\.\.\)"):
        SparseConfig(compression={"density": 0.1})  # type: ignore[arg-type]


def test_a_sweep_names_its_wrong_values_before_the_first_run(tmp_path):
    sweep = ["--multirun", "data=mock", f"runs_dir={tmp_path}", "compression.density=0.1,7,8"]
    with pytest.raises(ConfigError) as refused:
        application.train(sweep)
    assert "for 2 reasons" in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_density_without_compression_is_said_to_have_no_effect(tmp_path):
    config = preparation.decide(
        compose(["data=mock", "preset=lossless", "compression.density=0.1", "cluster.device=cpu"])
    )
    assert "density=0.1 has no effect" in preparation.describe(config, tmp_path)


def test_attach_names_what_serves_another_wrapper():
    from megatron_sparse.megatron.buckets import check_supported

    wrapped = torch.nn.parallel.DistributedDataParallel.__new__(
        torch.nn.parallel.DistributedDataParallel
    )
    with pytest.raises(HostError, match=r"megatron_sparse\.ddp_hook"):
        check_supported(wrapped)
