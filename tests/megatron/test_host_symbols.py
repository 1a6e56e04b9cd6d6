"""Which of Megatron's functions are found, and the error when one is missing."""

import importlib.metadata
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.version import Version

from megatron_sparse.config.parameters import ParametersConfig
from megatron_sparse.errors import ConfigError, HostError
from megatron_sparse.megatron import host_symbols
from tests.megatron.test_versions import OLDEST


def test_the_installed_megatron_has_every_host_symbol():
    found = host_symbols.find_host_symbols()
    assert len(found) == 10
    assert [symbol for symbol in found if symbol.problem is not None] == []
    host_symbols.require_host_symbols("attach")
    host_symbols.require_host_symbols("install")


def test_the_tested_versions_are_those_of_the_tests_and_of_the_page():
    """docs/versions.md names no other version; these tests run on the newest, or a later one."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "versions.md").read_text()
    example = "0.20.0"
    assert set(re.findall(r"\b0\.\d\d\.\d+\b", page)) - {example} == set(host_symbols.TESTED)
    assert host_symbols.TESTED[0] == OLDEST
    installed = importlib.metadata.version("megatron-core")
    assert Version(installed) >= Version(host_symbols.NEWEST_TESTED)


class Changed:
    """A bucket group of another Megatron."""

    def start_grad_sync(self):
        """Takes no force_all_reduce."""


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (SimpleNamespace(), "no attribute '_ParamAndGradBucketGroup'"),
        (SimpleNamespace(_ParamAndGradBucketGroup=Changed), "without parameter force_all_reduce"),
    ],
)
def test_what_a_megatron_lacks_is_named(monkeypatch, found, problem):
    monkeypatch.setitem(sys.modules, "megatron.core.distributed.param_and_grad_buffer", found)
    with pytest.raises(HostError, match=problem) as caught:
        host_symbols.require_host_symbols("attach")
    assert "_ParamAndGradBucketGroup.start_grad_sync" in str(caught.value)
    assert "megatron-core>=0.19" in str(caught.value)


def test_without_the_training_loop_attach_still_works_and_install_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.training.training", None)
    host_symbols.require_host_symbols("attach")
    with pytest.raises(HostError, match=r"megatron\.training\.training\.setup_model_and_optimizer"):
        host_symbols.require_host_symbols("install")


def test_a_model_that_is_not_megatrons_ddp_is_refused():
    from megatron_sparse.megatron import attach

    model = SimpleNamespace(config=None)
    with pytest.raises(HostError, match="cannot be attached to"):
        attach(model)
    for chunks in ([], [model, model]):
        with pytest.raises(HostError, match="none, or one of them comes twice"):
            attach(chunks)


@pytest.mark.parametrize(
    ("setting", "options", "words"),
    [
        ({"fp16": True}, {}, "fp16 training"),
        ({"calculate_per_token_loss": True}, {}, "a loss per token"),
        ({}, {"parameters": ParametersConfig("exact")}, "parameters.method=exact"),
        (
            {"pipeline_model_parallel_size": 2},
            {"config": "auto"},
            "density=auto with pipeline stages",
        ),
    ],
)
def test_what_needs_the_optimizer_is_refused_without_it(setting, options, words):
    from megatron_sparse.megatron import attach

    with pytest.raises(ConfigError, match=f"{words} needs the optimizer"):
        attach(SimpleNamespace(config=SimpleNamespace(**setting)), **options)


def test_a_preset_in_the_optimizers_place_and_a_mapping_as_the_configuration_are_refused():
    from megatron_sparse.megatron import attach

    model, optimizer = SimpleNamespace(config=None), SimpleNamespace(step=None)
    with pytest.raises(ConfigError, match=r"without step\(\)"):
        attach(model, "safe")
    with pytest.raises(ConfigError, match="a SparseConfig, or a preset's name"):
        attach(model, optimizer, {"density": 0.1})
