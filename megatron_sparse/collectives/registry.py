"""The registry of schemes: every `SCHEME` that a module of this package defines.

A new scheme needs no line here: the registry finds its file.
"""

import pkgutil
from importlib import import_module
from pathlib import Path

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives.scheme import Scheme
from megatron_sparse.config.checks import one_of
from megatron_sparse.config.sparse import PlannerConfig, SchemeConfig, SparseConfig
from megatron_sparse.errors import ConfigError

AUTO = "auto"
"""The value of `scheme.name` that lets the planner choose."""


def find_schemes() -> dict[str, Scheme]:
    """Imports the package's modules; returns their schemes by name, sorted by `Scheme.place`.

    Raises:
        ConfigError: two modules define schemes of one name.
    """
    found: dict[str, Scheme] = {}
    here = str(Path(__file__).parent)
    modules = [import_module(m.name) for m in pkgutil.iter_modules([here], f"{__package__}.")]
    defined = [module.SCHEME for module in modules if hasattr(module, "SCHEME")]
    for scheme in sorted(defined, key=lambda each: (each.place, each.name)):
        register(scheme, found)
    return found


def register(scheme: Scheme, schemes: dict[str, Scheme]) -> None:
    """Adds a scheme to `schemes` under its name.

    Another package calls it to add its scheme to `SCHEMES`, in every process that uses the scheme.

    Raises:
        ConfigError: `schemes` has a scheme of that name already.
    """
    if scheme.name in schemes:
        raise ConfigError(
            f"two schemes have the name {scheme.name!r}",
            expected="a name that no other scheme has",
            got=scheme.name,
            remedy="rename one of them: its module and its SCHEME",
        )
    schemes[scheme.name] = scheme


SCHEMES = find_schemes()
"""All schemes by name."""


def candidates() -> list[str]:
    """The schemes that the planner can choose from: those that have a cost."""
    return [name for name, scheme in SCHEMES.items() if scheme.cost is not None]


def skips_straggler(name: str) -> bool:
    """Whether a scheme, or `auto`, does not wait for the straggler."""
    return name in SCHEMES and SCHEMES[name].skips_straggler


def check(config: SparseConfig, op: CollectiveOp | None = None) -> SparseConfig:
    """Refuses a configuration that names an unknown scheme or does not fit its scheme; returns it.

    Called when a configuration is resolved, before ranks start. The package `config` itself does
    not import the schemes. `op`: what the gradients need, see `check_op`; None if not known yet.

    Raises:
        ConfigError: names the key.
    """
    scheme = config.scheme
    check_names(scheme, config.planner)
    if scheme.name != AUTO:
        _check_messages(config, SCHEMES[scheme.name])
    _check_engine(config)
    _check_straggler(config)
    check_capacity(scheme)
    if op is not None:
        check_op(scheme, config.planner, op)
    return config


def check_names(scheme: SchemeConfig, planner: PlannerConfig) -> None:
    """Refuses names that cannot be chosen; part of `check`.

    Raises:
        ConfigError: lists those that can.
    """
    one_of("scheme.name", scheme.name, (AUTO, *SCHEMES))
    for name in planner.schemes or ():
        one_of("planner.schemes", name, tuple(candidates()))


def check_capacity(scheme: SchemeConfig) -> None:
    """Refuses a capacity for a scheme without messages of fixed size; part of `check`.

    Raises:
        ConfigError: lists the schemes that have them.
    """
    given, name = scheme.given_capacity, scheme.name  # `given`: None for `auto` and null
    # With a capacity `scheme.name=auto` chooses among the sparse schemes that take one.
    if given is not None and name != AUTO and not SCHEMES[name].takes_slots:
        raise ConfigError(
            f"scheme.name={name} has no messages of fixed size",
            expected=" | ".join([AUTO, *(able for able, s in SCHEMES.items() if s.takes_slots)]),
            got=f"scheme.capacity={given}",
            remedy="choose another scheme, or leave scheme.capacity out",
        )


def check_op(scheme: SchemeConfig, planner: PlannerConfig, op: CollectiveOp) -> None:
    """Refuses schemes that cannot do the collective operation `op` that the gradients need.

    That is a reduce-scatter with Megatron's distributed optimizer, else an all-reduce. With
    `scheme.name=auto` it suffices that one of the candidates in `planner.schemes` can do it.

    Raises:
        ConfigError: lists the schemes that can.
    """
    key, names = "scheme.name", [scheme.name]
    if scheme.name == AUTO:
        key, names = "planner.schemes", planner.schemes
    # None: all schemes are candidates, and some scheme can do each operation.
    if names is None or any(op in SCHEMES[name].ops for name in names):
        return
    able = [name for name, each in SCHEMES.items() if op in each.ops]
    raise ConfigError(
        f"{key}={','.join(names)} cannot do the {op} that these gradients need",
        expected=" | ".join([AUTO, *able] if key == "scheme.name" else able),
        got=", ".join(names),
        remedy="choose another scheme, or train without Megatron's distributed optimizer, which "
        "needs the reduce_scatter (training.use_distributed_optimizer=false)",
    )


def _check_messages(config: SparseConfig, chosen: Scheme) -> None:
    """Refuses a format, bits or a dtype that the chosen scheme's messages cannot have."""
    scheme, bits = config.scheme, config.compression.given_value_bits
    if chosen.own_format and (scheme.format != "auto" or bits is not None):
        raise ConfigError(
            f"scheme.name={scheme.name} has messages of its own format, with full values",
            expected="scheme.format=auto, compression.value_bits=null",
            got=f"scheme.format={scheme.format}, compression.value_bits={bits}",
            remedy="leave scheme.format out and set compression.value_bits=null, or choose another "
            "scheme",
        )
    # With `sends_whole` messages are quantised, so their values have no floating-point dtype.
    if chosen.sends_whole and scheme.wire_dtype is not None:
        raise ConfigError(
            f"scheme.name={scheme.name} sends values in few bits, which scheme.wire_dtype excludes",
            expected="scheme.wire_dtype=null",
            got=scheme.wire_dtype,
            remedy="leave scheme.wire_dtype out",
        )


def _check_engine(config: SparseConfig) -> None:
    """Refuses `scheme.nccl_engine` with Rice records (any `value_bits`) or without capacity mode.

    The engine needs messages of fixed size, and it cannot encode format rice.
    """
    scheme, bits = config.scheme, config.compression.given_value_bits
    if not scheme.nccl_engine:
        return
    if bits is not None or scheme.format == "rice":
        raise ConfigError(
            "scheme.nccl_engine=true has no records of format rice",
            expected="compression.value_bits=null, and another scheme.format than rice",
            got=f"compression.value_bits={bits}, scheme.format={scheme.format}",
            remedy="leave scheme.nccl_engine out",
        )
    able = [AUTO, *(name for name, each in SCHEMES.items() if each.has_engine)]
    if scheme.capacity is None or scheme.name not in able:
        raise ConfigError(
            "scheme.nccl_engine=true with messages of unknown size",
            expected=f"a scheme.capacity, and scheme.name in {', '.join(able)}",
            got=f"scheme.capacity={scheme.capacity}, scheme.name={scheme.name}",
            remedy="set scheme.capacity=1.25, or leave scheme.nccl_engine out",
        )


def _check_straggler(config: SparseConfig) -> None:
    """Refuses a straggler-aware scheme without a known straggler, and any other scheme with one."""
    name, straggler = config.scheme.name, config.straggler
    if skips_straggler(name) and not straggler.leaves_behind:
        raise ConfigError(
            f"scheme.name={name} needs a straggler, but straggler.mode="
            f"{straggler.mode} never names one",
            expected="straggler.mode=pinned | persistent",
            got=f"straggler.mode={straggler.mode}",
            remedy="set straggler.mode=pinned straggler.rank=RANK, or "
            "straggler.mode=persistent scheme.deterministic=false",
        )
    able = [AUTO, *filter(skips_straggler, SCHEMES)]
    if straggler.leaves_behind and name not in able:
        raise ConfigError(
            f"scheme.name={name} waits for every rank",
            expected=f"{' | '.join(able)} with straggler.mode={straggler.mode}",
            got=name,
            remedy="choose one of them, or straggler.mode=observe, which only measures",
        )
