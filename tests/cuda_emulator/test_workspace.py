"""The bound of workspaces that the account of memory has, against what the launchers lay out."""

from ctypes import c_int64

import pytest

from megatron_sparse.doctor.memory import encoder_bytes
from megatron_sparse.wire import VALUE_BYTES
from tests.cuda_emulator.emulator import Emulator

NUMEL = 10_000_000
TIMES = 1.6
"""The bound is at most this many times what is taken."""


@pytest.mark.parametrize("segments", [1, 3, 100])
@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("density", [0.001, 0.1, 1.0])
def test_an_encoder_s(emulator: Emulator, segments: int, code: int, density: float) -> None:
    room = round(density * NUMEL * VALUE_BYTES[code])
    taken = emulator.library.workspace_of_encode(
        *map(c_int64, (NUMEL, segments)), code, c_int64(room)
    )
    assert taken <= encoder_bytes(NUMEL, room) <= TIMES * taken


@pytest.mark.parametrize("segments", [1, 100])
@pytest.mark.parametrize("code", [3, 6])
@pytest.mark.parametrize(("span", "at_once"), [(12, False), (15, False), (13, True)])
def test_an_encoder_s_of_few_bits(
    emulator: Emulator, segments: int, code: int, span: int, at_once: bool
) -> None:
    """It has room for all values, or for the words of chunks that are coded at once."""
    taken = emulator.library.workspace_of_rice_encode(
        *map(c_int64, (NUMEL, segments)), code, c_int64(4000), span, False, at_once
    )
    assert taken <= encoder_bytes(NUMEL, (2 if at_once else 4) * NUMEL) <= TIMES * taken
