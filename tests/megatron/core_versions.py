"""Trains with `attach` on the megatron-core in a folder; prints JSON. `test_versions` starts it.

    python -m tests.megatron.core_versions FOLDER

One process cannot import two versions of Megatron, so this runs in its own process.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import sys

from tests.ranks import run_ranks

STEPS = 5
AT_TARGET = {"value_bits": None, "warmup_iters": 0, "ramp_iters": 0, "keep_below_numel": 256}
KINDS = {
    "megatron": None,
    "dense": {"scheme": "dense"},
    "sparse": {"scheme": "direct", "density": 0.05},
}


def take_from(folder: str) -> None:
    """Makes `megatron` resolve to `folder` only.

    It is a namespace package: otherwise modules that an older version lacks would be imported from
    the installed newer one.
    """
    sys.path.insert(0, folder)
    import megatron

    megatron.__path__ = [path for path in megatron.__path__ if path.startswith(folder)]


def train(rank: int, world_size: int, folder: str) -> dict[str, object]:
    """Losses and weights of each kind of training, for overlap x distributed optimizer."""
    from megatron_sparse.megatron import cpu_mode

    cpu_mode.enable()
    take_from(folder)
    from megatron_sparse.doctor import checks
    from megatron_sparse.errors import HostError
    from megatron_sparse.megatron import attach, detach
    from megatron_sparse.megatron.small_gpt import SmallGPT, SmallGPTConfig

    runs = {}
    for overlap, distributed in itertools.product((False, True), repeat=2):
        setting = SmallGPTConfig(overlap=overlap, distributed_optimizer=distributed)
        found = runs[f"overlap={overlap}, distributed={distributed}"] = {}
        for kind, options in KINDS.items():
            toy = SmallGPT(setting)
            attachment = options and attach(toy.ddp, toy.optimizer, **options, **AT_TARGET)
            losses = [toy.step()[0] for _ in range(STEPS)]
            weights = toy.weights().numpy().tobytes()
            found[kind] = {"losses": losses, "weights": hashlib.sha256(weights).hexdigest()}
            if attachment:
                residuals = attachment.residuals.by_parameter()
                found[kind]["residual"] = sum(float(value.abs().sum()) for _, value in residuals)
                detach(attachment)
    try:
        from megatron_sparse.megatron import install

        install()
        refusal = None
    except HostError as error:
        refusal = str(error)
    return {
        "version": importlib.metadata.version("megatron-core"),
        "install": refusal,
        "doctor": {check.name: [check.status, check.detail] for check in checks._megatron()},
        "runs": runs,
    }


if __name__ == "__main__":
    # Import it by its module name: the ranks do not find names of `__main__`.
    from tests.megatron import core_versions

    print(json.dumps(run_ranks(core_versions.train, 2, sys.argv[1], timeout_s=700)))
