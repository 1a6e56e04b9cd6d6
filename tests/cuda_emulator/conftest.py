"""The library of emulated launchers, compiled once for all tests of this folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cuda_emulator.emulated import Codecs, compile_library, find_gxx


@pytest.fixture(scope="session")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> Codecs:
    """The launchers; the schedule is the test's to choose."""
    if find_gxx() is None:
        pytest.skip("the emulator needs g++")
    # test_emulator.py runs the codecs' tests again, with a library built for AddressSanitizer.
    built = os.environ.get("MEGATRON_SPARSE_EMULATED_CODECS")
    return Codecs(Path(built) if built else compile_library(tmp_path_factory.mktemp("emulated")))
