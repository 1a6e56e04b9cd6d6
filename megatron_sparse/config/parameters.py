"""The section `parameters` of the configuration: defaults and checks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sparse.config.checks import Checked, choice, whole

METHODS = ("auto", "raw", "exact", "lossy")
PER_NODE = ("auto", "always", "never")
COMPRESSED = ("exact", "lossy")
"""Methods that are refused where they cannot work."""


@dataclass
class ParametersConfig(Checked):
    """How Megatron's distributed optimizer gathers the updated parameters.

    See docs/parameter-gather.md.

    Attributes:
        method: `raw` is Megatron's own all-gather. `exact` sends how far each number moved since
            the last gather; every rank ends with Megatron's own bits. It needs the distributed
            optimizer and `attach(model, optimizer)`. `lossy` needs these and tensors on a CPU; it
            sends fp32 parameters in `bits`, and keeps what was withheld in the optimizer's
            parameters, from where it is sent in later steps; bf16 and fp16 parameters it gathers as
            `exact` does. `auto` takes for each bucket raw or exact, the one that is predicted to
            take less time, by the speed of links (`planner.cluster`, else measured at the start)
            and codec; `raw` where `exact` cannot work. It never takes `lossy`.
        per_node: whether a record crosses to each other node once, and travels raw inside it.
            `auto` does so where it is predicted to take less time, which it is for `exact` only;
            it makes no difference on one node, or with one rank on each. Where gradients are
            compressed at `compression.level=node`, `auto` is `always`, for `lossy` too: parameters
            take the gradients' lanes.
        bits: of `lossy`: 4 or 8 for each number; 128 numbers have a scale of 16 bits.
        verify_every: of `exact` and `lossy`: every so many gathers of a bucket, ranks compare
            hashes of what they hold. 1 compares in each gather, for tests.
    """

    SECTION = "parameters"

    method: str = choice("auto", METHODS)
    per_node: str = choice("auto", PER_NODE)
    bits: int = choice(4, (4, 8))
    verify_every: int = whole(100, 1)
