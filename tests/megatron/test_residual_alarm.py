"""The warning about a residual that outgrows the gradient."""

from __future__ import annotations

import logging
import math

import pytest

from megatron_sparse.megatron.spikes import warn_if_large


@pytest.mark.parametrize(
    ("norm", "warned"), [(3.0, False), (30.0, False), (30.1, True), (math.nan, True)]
)
def test_only_a_residual_beyond_the_limit_is_named(norm, warned, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron_sparse"), "propagate", True)
    with caplog.at_level(logging.WARNING, "megatron_sparse"):
        warn_if_large(700, norm, grad_norm=3.0, limit=10.0)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == warned
    assert all("step 700" in line and "residual_alarm=10" in line for line in found)
