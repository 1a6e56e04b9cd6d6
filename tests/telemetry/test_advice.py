"""The line at a run's end that says which preset would have done, or would have been faster."""

from __future__ import annotations

import pytest

from megatron_sparse.telemetry.advice import advice

# A bucket's dense ring between 4 ranks: 60 MB; `safe` sends 0.112 of it.
DENSE_BYTES = 60e6


def of_run(*, bits, share, exposed_ms, hidden_ms, network_ms, passes_ms=300.0, ranks=4):
    """What `advice` says of a run of ten iterations; milliseconds of each."""
    stage_ms = {"host_wait": exposed_ms, "forward_backward": passes_ms}
    figures = {
        "iterations": 10,
        "iteration_ms_mean": passes_ms + exposed_ms + 100,
        "stage_ms_mean": stage_ms,
        "network_ms_least": network_ms,
        "bits_per_element": bits,
        "dense_bytes": 10 * DENSE_BYTES,
        "wire_bytes": 10 * share * DENSE_BYTES,
        "overlapped_ms": hidden_ms,
    }
    return advice({"world_size": ranks, "phases": {}, **figures})


def test_a_fast_link_needs_no_compression():
    said = of_run(bits=1.73, share=0.112, exposed_ms=4.0, hidden_ms=60.0, network_ms=5.6)
    assert said == (
        "links of 9.6 Gbit/s, 1% of an iteration exposed: by a model, preset=lossless would do"
    )


def test_what_hides_in_few_bits_but_not_whole():
    said = of_run(bits=1.73, share=0.112, exposed_ms=4.0, hidden_ms=60.0, network_ms=50.0)
    assert said.endswith("preset=quantised would do")


def test_a_slow_link_names_the_gain_and_its_price():
    said = of_run(bits=1.73, share=0.112, exposed_ms=400.0, hidden_ms=130.0, network_ms=500.0)
    # k = 0.6 / 1.73: 530 - 0.653 x 500 = 203 ms in flight, 130 of them hidden.
    assert said == (
        "links of 0.108 Gbit/s, 50% of an iteration exposed: by a model, preset=balanced would "
        "save 0.33 s an iteration; it costs 0.41 % of the loss"
    )


def test_a_dense_run_on_a_slow_link_is_told_the_least_lossy_gain():
    said = of_run(bits=32.0, share=1.0, exposed_ms=4000.0, hidden_ms=130.0, network_ms=4100.0)
    assert said.endswith(
        "preset=quantised would save 3.6 s an iteration; it costs 0.05 % of the loss"
    )


def test_nothing_to_gain():
    """Waits that no network takes: of codecs, or of another rank."""
    said = of_run(bits=0.16, share=0.012, exposed_ms=100.0, hidden_ms=130.0, network_ms=120.0)
    assert said.endswith("no other preset would be faster")


@pytest.mark.parametrize("known", [{"ranks": 1}, {"bits": None}, {"share": 0.0}])
def test_without_a_network_it_says_nothing(known):
    given = {"bits": 1.73, "share": 0.1, "exposed_ms": 4.0, "hidden_ms": 60.0, "network_ms": 5.0}
    assert of_run(**given | known) is None
