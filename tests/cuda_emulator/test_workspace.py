"""The workspaces that Python computes are those that the launchers lay out."""

from ctypes import c_int64

import pytest

from megatron_sparse.cuda_ext import workspace
from megatron_sparse.cuda_ext.record_spec import RecordSpec
from megatron_sparse.wire import FORMAT_RICE
from tests.cuda_emulator.emulator import Emulator


@pytest.mark.parametrize("numel", [0, 1, 4095, 4097, 1_000_000])
@pytest.mark.parametrize("segments", [1, 3, 100])
@pytest.mark.parametrize(("code", "value_bytes"), [(0, 4), (1, 2)])
def test_an_encoder_s(emulator: Emulator, numel, segments, code, value_bytes) -> None:
    for room in (0, 1000, 4 * numel + 48):
        expected = emulator.library.workspace_of_encode(
            *map(c_int64, (numel, segments)), code, c_int64(room)
        )
        assert workspace.encode_bytes(numel, segments, value_bytes, room) == expected


@pytest.mark.parametrize("numel", [0, 1, 4097, 1_000_000])
@pytest.mark.parametrize("segments", [1, 100])
@pytest.mark.parametrize("code", [0, 1, 3, 6])
def test_an_encoder_s_of_rice_records(emulator: Emulator, numel, segments, code) -> None:
    for span, room, whole in ((12, 4000, False), (15, 4 * numel + 48, False), (24, 0, True)):
        whole &= code == 3
        expected = emulator.library.workspace_of_rice_encode(
            *map(c_int64, (numel, segments)), code, c_int64(room), span, whole
        )
        spec = RecordSpec(code, 0, FORMAT_RICE, log2_span=span, without_indices=whole)
        assert workspace.rice_encode_bytes(numel, segments, spec, room) == expected


@pytest.mark.parametrize("numel", [0, 1, 1000, 1_000_000])
@pytest.mark.parametrize("ranges", [1, 7, 300])
@pytest.mark.parametrize("samples", [1, 999, 40_000])
def test_sampling_s(emulator: Emulator, numel, ranges, samples) -> None:
    expected = emulator.library.workspace_of_threshold(*map(c_int64, (ranges, numel, samples)))
    assert workspace.threshold_bytes(ranges, numel, samples) == expected
