"""`attach` on the oldest megatron-core that has the functions it hooks, but no training loop.

The newer one is what all other tests here run on.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.programs import ROOT, ended, with_variables

# For loaded machines; an idle one takes ten seconds.
pytestmark = pytest.mark.timeout(900)
OLDEST = "0.16.1"
COMBINATIONS = [
    f"overlap={overlap}, distributed={distributed}"
    for overlap in (False, True)
    for distributed in (False, True)
]


@pytest.fixture(scope="session")
def oldest_core() -> Path:
    """Folder of the oldest version, kept in the environment from one run of the tests to the next.

    Beside the environment's own Megatron, and without what it depends on: torch and the rest are
    the environment's.
    """
    folder = Path(sys.prefix) / "share" / f"megatron-core-{OLDEST}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        done = ended([*pip, "--target", f"{scratch}/new", f"megatron-core=={OLDEST}"], 300)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            pytest.skip(f"pip cannot install megatron-core {OLDEST}: {reason}")
        # Atomically, so that an interrupted installation does not look complete.
        (Path(scratch) / "new").rename(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(oldest_core) -> list[dict]:
    """The results of each rank of `core_versions`."""
    module = ["-m", "tests.megatron.core_versions", str(oldest_core)]
    command = [sys.executable, "-W", "ignore", *module]
    done = ended(command, 800, env=with_variables(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_the_oldest_version_and_not_the_installed_one(ranks):
    assert [rank["version"] for rank in ranks] == [OLDEST, OLDEST]
    assert importlib.metadata.version("megatron-core") != OLDEST


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_dense_is_bit_for_bit_megatron(ranks, combination):
    for rank in ranks:
        runs = rank["runs"][combination]
        assert runs["dense"] == runs["megatron"] | {"residual": 0}


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_sparse_training_learns_and_keeps_ranks_identical(ranks, combination):
    first, second = (rank["runs"][combination]["sparse"] for rank in ranks)
    assert first["losses"][-1] < first["losses"][0]
    assert first["weights"] == second["weights"]
    assert first["losses"] != ranks[0]["runs"][combination]["megatron"]["losses"]
    assert first["residual"] > 0
    assert second["residual"] > 0


def test_missing_functions_are_named(ranks):
    """By the error of `install` and by the doctor, each with the version that has it."""
    assert "megatron.training.models.gpt.GPTModelConfig" in ranks[0]["install"]
    assert "megatron-core>=0.19" in ranks[0]["install"]
    found = ranks[0]["doctor"]
    assert found["megatron-core"] == ["ok", OLDEST]
    assert found["Megatron functions for attach"][0] == "ok"
    status, detail = found["Megatron functions for install"]
    assert status == "fail"
    assert "megatron.training.training.train_step: No module named 'megatron.training'" in detail
