"""On a GPU: large records of moves have the CPU's bytes, and the codec reaches its speed."""

from collections.abc import Callable
from statistics import median

import pytest
import torch

from megatron_sparse.cuda_ext import load
from megatron_sparse.formats.moves import decode_moves_, down_words, encode_moves, keep_moves_
from megatron_sparse.wire import MOVES_CODERS
from tests.formats.moves_cases import DTYPES, adam_like

pytestmark = pytest.mark.gpu

LARGE = 2**27
"""Numbers: 8192 chunks of rans, 62 for each of 132 multiprocessors."""
LEAST_BYTES_S = 100e9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_chunks_than_resident_blocks(dtype: torch.dtype) -> None:
    """So that look-back waits; five times, because an emulated device hardly shows this."""
    old, new = adam_like(2**24 + 4097, dtype)
    down = torch.randint(-(2**31), 2**31, (down_words(old.numel()),), dtype=torch.int32)
    wanted = encode_moves(old, new, epoch=1, down=down)
    was, now, signs = old.cuda(), new.cuda(), down.cuda()
    for _ in range(5):
        record = encode_moves(was, now, epoch=1, down=signs)
        assert torch.equal(record.cpu(), wanted)
    decode_moves_([record], [was], epoch=1, down=[signs])
    assert torch.equal(was.view(torch.uint8), now.view(torch.uint8))
    keep_moves_(old, new, down)
    assert torch.equal(signs.cpu(), down)


def seconds(prepare: Callable[[], object], action: Callable[[], object]) -> float:
    """The median of ten calls on the device, after two that warm up."""
    times_s = []
    for _ in range(12):
        prepare()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        end.synchronize()
        times_s.append(begin.elapsed_time(end) * 1e-3)
    return median(times_s[2:])


def test_speed() -> None:
    """Of bf16 parameters, each way; the launches without the host's reading of sizes."""
    load("cuda")
    torch.manual_seed(0)
    old = (torch.randn(LARGE, device="cuda") * 0.02).bfloat16()
    new = (old + torch.randn(LARGE, device="cuda") * 9e-5).bfloat16()
    codes, ops = [MOVES_CODERS.index("rans")], torch.ops.megatron_sparse
    out = torch.empty(ops.moves_room(LARGE, 1), dtype=torch.uint8, device="cuda")
    down = torch.zeros(down_words(LARGE), dtype=torch.int32, device="cuda")
    size = int(ops.moves_encode(old, new, down, 1, out))
    record, held = out[:size].clone(), old.clone()
    encode_s = seconds(lambda: None, lambda: ops.moves_encode(old, new, down, 1, out))
    decode_s = seconds(
        lambda: (held.copy_(old), down.zero_()),
        lambda: ops.moves_decode_([held], [down], [record], codes),
    )
    assert torch.equal(held, new)
    found = {"encode": old.nbytes / encode_s, "decode": old.nbytes / decode_s}
    said = ", ".join(f"{way} {speed / 1e9:.0f} GB/s" for way, speed in found.items())
    print(f"{8 * size / LARGE:.2f} bits, {said}")
    assert min(found.values()) >= LEAST_BYTES_S, said
