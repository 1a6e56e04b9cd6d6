"""`attach` on the oldest megatron-core that has the functions it hooks, but no training loop.

The newer one is what all other tests here run on.
"""

import importlib.metadata
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_sparse.doctor import checks
from megatron_sparse.errors import HostError
from megatron_sparse.megatron import cpu_mode
from tests.megatron import test_attach_core
from tests.programs import ended
from tests.ranks import PACKAGE, run_ranks

# For loaded machines; an idle one takes ten seconds.
pytestmark = pytest.mark.timeout(900)
OLDEST = "0.16.1"


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


def _take_from(folder):
    """Makes `megatron` resolve to `folder` only.

    It is a namespace package: otherwise modules that an older version lacks would be imported from
    the installed newer one.
    """
    sys.path.insert(0, folder)
    import megatron

    megatron.__path__ = [path for path in megatron.__path__ if path.startswith(folder)]


def _on_oldest(rank, world_size, folder):
    """Trains; then what `install` and the doctor say."""
    cpu_mode.enable()
    _take_from(folder)
    assert importlib.metadata.version("megatron-core") == OLDEST
    for test in (
        test_attach_core.test_dense_is_bit_for_bit_megatron,
        test_attach_core.test_sparse_training_learns_keeps_ranks_identical_and_repeats,
    ):
        test.__wrapped__(rank)
    with pytest.raises(HostError) as refused:
        from megatron_sparse.megatron import install  # noqa: F401
    return str(refused.value), {check.name: check for check in checks._megatron()}


def test_attach_trains_and_missing_functions_are_named(oldest_core):
    """By the error of `install` and by the doctor, each with the version that has it."""
    assert importlib.metadata.version("megatron-core") != OLDEST
    # One process cannot import two versions: these ranks have imported none.
    ranks = run_ranks(_on_oldest, 2, str(oldest_core), timeout_s=800, imported=PACKAGE)
    for refusal, found in ranks:
        assert "megatron.training.models.gpt.GPTModelConfig" in refusal
        assert "megatron-core>=0.19" in refusal
        core = found["megatron-core"]
        assert (core.status, core.detail) == ("ok", OLDEST)
        assert found["Megatron functions for attach"].status == "ok"
        missing = found["Megatron functions for install"]
        assert missing.status == "fail"
        first = "megatron.training.training.train_step: No module named 'megatron.training'"
        assert first in missing.detail
