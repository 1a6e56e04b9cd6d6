"""`zen` on CUDA tensors: the CPU's sums and bytes, over a virtual cluster on a GPU."""

import dataclasses

import pytest
import torch

from tests.collectives.cases import OPTIONS, Case, contribution, exact_sum, parameters, run_tapped
from tests.cuda_emulator.device import Place

VARIANTS = [dataclasses.replace(OPTIONS, hash_rounds=rounds) for rounds in (0, 3)]


def run(case: Case, device: torch.device) -> tuple[list[torch.Tensor], list[list[bytes]]]:
    """Each rank's sum, and the records that it sent; on the CPU."""
    gradients = [contribution(case, rank).to(device) for rank in range(case.n)]
    sums, sent, _ = run_tapped(case, gradients, parameters(case.numel), device)
    records = [[data.cpu().numpy().tobytes() for _, data in each] for each in sent]
    return [values.cpu() for values in sums], records


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: str(o.hash_rounds))
@pytest.mark.parametrize(("n", "dtype", "wire"), [(3, "fp32", "fp32"), (2, "bf16", "bf16")])
def test_sums_and_records_are_the_cpus(place: Place, n, dtype, wire, options) -> None:
    for density in (0.0, 0.02, 0.5):
        case = Case("zen", n, dtype=dtype, wire=wire, density=density, numel=700, options=options)
        device = place(torch.zeros(1)).device
        sums, sent = run(case, device)
        _, wanted = run(case, torch.device("cpu"))
        assert sent == wanted
        for got in sums:
            assert torch.equal(got.double(), exact_sum(case)), case
