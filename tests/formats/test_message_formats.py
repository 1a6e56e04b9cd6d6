"""`scheme.format` reaches the message, and does not change the decoded values."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.compression.selection import MessageSpec, Selector
from megatron_sparse.config.sparse import MESSAGE_FORMATS, CompressionConfig, SchemeConfig
from megatron_sparse.cuda_ext.record_spec import Expected, RecordSpec, Segments
from megatron_sparse.errors import ConfigError, ExtensionError
from megatron_sparse.formats import torch_codec
from megatron_sparse.formats.message import FORMAT_CODES, WIRE_CODES, MessageBuffers, decode_add_
from megatron_sparse.recording import StageTimer
from megatron_sparse.wire import FORMAT_NAMES, FORMAT_PICI
from tests.headers import read_headers

NUMEL = 60_000


def select(form, density):
    grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    parameters = [ParameterSlice("w", 0, 59_000), ParameterSlice("b", 59_000, NUMEL, keep=True)]
    bucket = Bucket("0", grad.clone(), parameters, CollectiveOp.ALL_REDUCE, 2)
    config = CompressionConfig(density=density)
    residuals = ResidualStore(torch.float32)
    selector = Selector(config, residuals, 0, MessageBuffers())
    timer = StageTimer()
    message = selector.select(
        bucket, MessageSpec(density, format=form, block_size=64), step=3, timer=timer
    )
    assert torch.equal(bucket.grad_N, grad), "selection on the CPU only reads the gradient"
    assert timer.times_us()["prune"] > 0
    total = torch.full((NUMEL,), torch.nan)
    offsets = message.layout.segment_offsets
    records = message.buffer[: message.nbytes]
    decode_add_(total, records, Expected(offsets, WIRE_CODES["fp32"], 3, rank=0), fresh=True)
    headers = read_headers(records.numpy().tobytes(), rank=0)
    assert message.nnz == sum(header.nnz for header in headers) == int(total.count_nonzero())
    residual = next(iter(residuals.tensors()))
    assert torch.equal(total + residual, grad), "what was not sent stays in the residual"
    return total, [FORMAT_NAMES[header.format] for header in headers]


@pytest.mark.parametrize(("density", "smallest"), [(0.01, "coo"), (0.2, "pici")])
def test_each_format_carries_the_same(density, smallest):
    totals = {}
    for form in MESSAGE_FORMATS:
        totals[form], (pruned, kept) = select(form, density)
        assert kept == "dense"
        assert pruned == {"auto": smallest}.get(form, form)
        assert torch.equal(totals[form], totals["auto"])


def test_the_names_are_those_of_the_configuration():
    assert set(FORMAT_CODES) == {
        *MESSAGE_FORMATS,
        *(s.own_format for s in SCHEMES.values() if s.own_format),
    }
    with pytest.raises(ConfigError, match=r"scheme\.format"):
        SchemeConfig(format="csr")


def test_torch_operations_refuse_what_they_cannot_write():
    with pytest.raises(ExtensionError, match="torch operations do not write"):
        torch_codec.encode(
            torch.zeros(8),
            Segments(torch.tensor([0, 8]), torch.zeros(1, dtype=torch.uint8)),
            torch.tensor([0]),
            RecordSpec(0, 0, record_format=FORMAT_PICI),
            torch.zeros(200, dtype=torch.uint8),
        )
