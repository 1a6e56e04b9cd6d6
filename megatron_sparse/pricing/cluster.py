"""The costs of a cluster: links, the backend's all-reduce, codecs and the host (a rank's CPU).

They are one YAML file: `calibrate` measures it on the user's own ranks, and four model clusters,
which are not measured, are shipped. Cost models read the file; all ranks read the same one. The
network is an alpha-beta model (Hockney): a message of m bytes takes alpha + beta m seconds. A
codec's call on N elements takes seconds_per_call + N seconds_per_element; operation, format and
density determine both numbers.

Between two measured densities a codec's time is assumed to be linear, as for a scan with some work
for each entry. Outside of them the time of the nearest density counts. Where a record changes its
form, from pairs to a bitmap, the time jumps (`PAIRS_END`); each side's line extends to there.

This is one file because the YAML's fields, their checks and their use belong to one class.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_sparse.config.checks import in_range, one_of
from megatron_sparse.config.scheme import RING_DENSITIES
from megatron_sparse.errors import ConfigError, writing
from megatron_sparse.transport.topology import Link, Topology

FORMATS = ("dense", "coo", "pici", "blocks", "pairs", "hash_bitmap", "rice", "rice_q4", "dense_q4")
"""Formats of records; `pairs` and `hash_bitmap` are ZEN's Push and Pull, of whole buckets;
`rice_q4` and `dense_q4` have values of 4 bits, with and without indices."""
PAIRS_END = 1 / 32
"""Density from which a record of `pairs` holds a bitmap, which is smaller for every dtype."""
# More for one message, byte or element is no measurement, and sums of it could become infinite.
_MOST_S = 3600.0
CONFIG_MODULE, FOLDER = "megatron_sparse.configs", "cluster_models"
_REMEASURE = "measure anew: megatron-sparse calibrate --output FILE --force"


class CodecOp(StrEnum):
    """A rank's local operations on a bucket.

    Attributes:
        SELECT: sampled threshold, error feedback, pruning and encoding of a dense gradient.
        ENCODE: a dense vector into a record, its non-zeros counted first.
        DECODE_ADD: a record into a dense sum.
        DECODE: a record into a dense buffer; overwrites the buffer's content.
        ADD: a dense vector into a dense sum.
        COPY: a dense vector.
        PARTITION: a message's entries, cut by hash for all servers (`pairs`).
    """

    SELECT = "select"
    ENCODE = "encode"
    DECODE_ADD = "decode_add"
    DECODE = "decode"
    ADD = "add"
    COPY = "copy"
    PARTITION = "partition"


@dataclass(frozen=True)
class CodecRate:
    """One measurement of a codec, on fp32 and with as many threads as a rank has.

    Attributes:
        op: what was done.
        format: of the record; `dense` where there is none.
        density: non-zeros / elements of the whole vector.
        seconds_per_call: the part that does not depend on the number of elements.
        seconds_per_element: of the whole vector, zeros included.
    """

    op: CodecOp
    format: str
    density: float
    seconds_per_call: float
    seconds_per_element: float

    def __post_init__(self) -> None:
        """Refuses unknown names and numbers out of range."""
        one_of("op", self.op, tuple(CodecOp))
        one_of("format", self.format, FORMATS)
        in_range("density", self.density, 0, 1, low_open=True)
        in_range("seconds_per_call", self.seconds_per_call, 0, _MOST_S)
        in_range("seconds_per_element", self.seconds_per_element, 0, _MOST_S)


@dataclass(frozen=True)
class ClusterModel:
    """The content of a cluster file, see the module's docstring; checked when it is made.

    Attributes:
        name: for tables.
        device: `cpu` or `cuda`.
        nodes: ranks on each node that was measured.
        nic: as `Topology.nic`.
        intra: between two ranks of a node.
        inter: between nodes. If the measured ranks lack one of these two links, the file has the
            other link's numbers in its place; `topology` never uses it.
        dense: of the backend's own all-reduce, seen as a ring over all nodes: n ranks and m bytes
            take 2 (n - 1) (alpha + beta m / n); half for a reduce-scatter.
        host_s_per_message: seconds that the progress thread adds to a pairwise message.
        host_s_per_bucket: further seconds for each bucket: plan, launch, threads, records.
        codec: the rates.
        ring_densities: `scheme.ring_{intra,inter,gather}_density` by format, found by `calibrate
            --sweep`; a missing format was not swept.
        fingerprint: of the machine that was measured, see `check_fingerprint`; empty for a model.

    Raises:
        ConfigError: names the key.
    """

    name: str
    device: str
    nodes: tuple[int, ...]
    nic: str
    intra: Link
    inter: Link
    dense: Link
    host_s_per_message: float
    host_s_per_bucket: float
    codec: tuple[CodecRate, ...]
    ring_densities: dict[str, tuple[float, float, float]]
    fingerprint: dict[str, str]

    def __post_init__(self) -> None:
        """Refuses values that no cluster has; `codec`'s rates have checked themselves."""
        one_of("device", self.device, ("cpu", "cuda"))
        one_of("nic", self.nic, ("rank", "node"))
        if not self.nodes:
            raise ConfigError("nodes is empty", expected="ranks on each node", got=self.nodes)
        for number, ranks in enumerate(self.nodes):
            in_range(f"nodes[{number}]", ranks, 1, math.inf, integer=True)
        # 4.0 has passed as a whole number. A frozen dataclass is changed by `object.__setattr__`.
        object.__setattr__(self, "nodes", tuple(map(int, self.nodes)))
        for kind in ("intra", "inter", "dense"):
            link = getattr(self, kind)
            in_range(f"{kind}.alpha_s", link.alpha_s, 0, _MOST_S)
            in_range(f"{kind}.beta_s", link.beta_s, 0, _MOST_S)
        in_range("host_s_per_message", self.host_s_per_message, 0, _MOST_S)
        in_range("host_s_per_bucket", self.host_s_per_bucket, 0, _MOST_S)
        counts = Counter((rate.op, rate.format, rate.density) for rate in self.codec)
        for (op, form, density), count in counts.items():
            if count > 1:
                raise ConfigError(
                    f"codec has {op} {form} at density {density:g} more than once",
                    expected="one rate for each operation, format and density",
                    got=count,
                )
        for form, densities in self.ring_densities.items():
            one_of("ring_densities", form, tuple(RING_DENSITIES))
            if len(densities) != 3:
                raise ConfigError(
                    f"ring_densities.{form} does not fit",
                    expected="three densities: intra, inter, gather",
                    got=densities,
                )
            for number, density in enumerate(densities):
                in_range(f"ring_densities.{form}[{number}]", density, 0, math.inf)

    @property
    def is_model(self) -> bool:
        """Whether none of its numbers was measured on the cluster that it describes."""
        return not self.fingerprint

    def topology(self, world_size: int) -> Topology:
        """The nodes and links of `world_size` ranks on this cluster.

        The nodes are the measured ones if these have `world_size` ranks together. Otherwise there
        is one node if only one was measured; else all nodes but the last are as large as the
        largest measured one, and the last has the remaining ranks.

        Example:
            >>> find("perlmutter").topology(6).node_sizes
            (4, 2)
        """
        links = (self.intra, self.inter, self.nic)
        if world_size == sum(self.nodes):
            return Topology(self.nodes, *links)
        if len(self.nodes) == 1:
            return Topology((world_size,), *links)
        return Topology.even(world_size, max(self.nodes), *links)

    def dense_link(self, world_size: int) -> Link:
        """The link that prices the backend's all-reduce, a ring over `world_size` ranks.

        It is `intra` if they lie on one node of several: the backend was measured
        across nodes only.
        """
        is_within_node = len(self.nodes) > 1 and len(self.topology(world_size).node_sizes) == 1
        return self.intra if is_within_node else self.dense

    def codec_s(
        self, op: CodecOp, format: str, numel: float, density: float, element_bytes: int = 4
    ) -> float:
        """Predicted seconds of one call of a codec's operation.

        Args:
            op: the operation.
            format: of the record, one of `FORMATS`; `dense` where there is no record.
            numel: elements of the vector, zeros included; 0 takes no time.
            density: non-zeros / elements.
            element_bytes: of a value on the wire. Copies and additions take time in proportion;
                the rest does not get faster with narrower values (docs/codecs.md).

        Raises:
            ConfigError: the file has no rate for `op` and `format`.
        """
        if not numel:
            return 0.0
        rates = self._rates.get((op, format))
        if rates is None:
            known = sorted({f"{rate.op} {rate.format}" for rate in self.codec})
            raise ConfigError(
                f"cluster {self.name} has no codec rate for {op} {format}",
                expected=f"a rate for {op} {format}",
                got=", ".join(known) or "no rates",
                remedy=_REMEASURE,
            )
        # Rates were measured with fp32 values, of 4 bytes.
        width_ratio = element_bytes / 4 if op in (CodecOp.ADD, CodecOp.COPY) else 1.0
        if format == "pairs":  # from `PAIRS_END` on such records hold a bitmap, with other rates
            rates = _on_this_side(rates, density)
        per_call, per_element = _between(rates, density)
        return per_call + numel * per_element * width_ratio

    @cached_property
    def _rates(self) -> dict[tuple[CodecOp, str], list[CodecRate]]:
        rates: dict[tuple[CodecOp, str], list[CodecRate]] = defaultdict(list)
        for rate in sorted(self.codec, key=lambda rate: rate.density):
            rates[rate.op, rate.format].append(rate)
        return dict(rates)

    def check_fingerprint(self, found: Mapping[str, str]) -> None:
        """Refuses a file that was measured on another cluster; a model fits everywhere.

        `found` is that of the ranks that run now, `planner.fingerprint`.

        Raises:
            ConfigError: names the field that differs.
        """
        for field, measured in self.fingerprint.items():
            if found.get(field) != measured:
                raise ConfigError(
                    f"cluster {self.name} was measured elsewhere: its {field} is not this one's",
                    expected=found.get(field),
                    got=measured,
                    remedy=_REMEASURE,
                )

    @classmethod
    def load(cls, path: Path) -> ClusterModel:
        """Reads what `save` wrote.

        Raises:
            ConfigError: the file cannot be read, a key is missing or unknown, or a value is wrong.
        """
        # Imported here, so that GPU tests, which read no file, need no OmegaConf.
        from omegaconf import OmegaConf

        try:
            content = OmegaConf.to_container(OmegaConf.load(path))
        except Exception as error:  # yaml's errors have no common base with those of the disk
            # A text is no mapping, so the next check refuses it and shows it to the user.
            content = " ".join(f"{type(error).__name__}: {error}".split())
        if not isinstance(content, dict) or not content:
            raise ConfigError(
                f"{path} cannot be read",
                expected="a cluster, as YAML",
                got=content or "nothing in it",
                remedy=_REMEASURE,
            )
        try:
            return _from_yaml(content)
        except ConfigError as error:
            raise ConfigError(
                f"{path}: {error.what}",
                expected=error.expected,
                got=error.got,
                remedy=error.remedy or _REMEASURE,
            ) from None

    def save(self, path: Path, comment: str) -> None:
        """Writes the file.

        Makes the folder. `comment`: lines at the top, the first of them the command that made it.

        Raises:
            ConfigError: it cannot be written.
        """
        # Imported here, so that GPU tests, which write no file, need no PyYAML.
        import yaml

        head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
        # Through JSON tuples become lists, and enums strings: `safe_dump` would refuse both.
        plain = json.loads(json.dumps(dataclasses.asdict(self)))
        # One line a rate. In field order, keys follow `codec`: `load` refuses a file cut off there.
        text = yaml.safe_dump(
            plain, sort_keys=False, default_flow_style=None, width=math.inf, allow_unicode=True
        )
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(head + text, "utf-8")


def shipped() -> list[str]:
    """Names of the model clusters."""
    folder = files(CONFIG_MODULE) / FOLDER
    names = [entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return sorted(name.removesuffix(".yaml") for name in names)


def shipped_file(name: str) -> Path:
    """The file of a model cluster."""
    return Path(str(files(CONFIG_MODULE) / FOLDER / f"{name}.yaml"))


def find(name_or_path: str | Path) -> ClusterModel:
    """Loads a model cluster by its name, or a cluster file by its path.

    Raises:
        ConfigError: there is no such model or file, or the file is wrong.
    """
    name = str(name_or_path)
    path = shipped_file(name) if name in shipped() else Path(name)
    if not path.is_file():
        raise ConfigError(
            f"there is no cluster {name!r}",
            expected=f"a file of `megatron-sparse calibrate`, or {' | '.join(shipped())}",
            got=name,
            remedy="megatron-sparse calibrate --output FILE makes one",
        )
    return ClusterModel.load(path)


def _on_this_side(rates: Sequence[CodecRate], density: float) -> Sequence[CodecRate]:
    """The rates on the side of `PAIRS_END` where `density` lies: of pairs below, of bitmaps above.

    A rate extrapolated to `PAIRS_END` from the nearest two is added, because the time jumps there.
    If fewer than two rates lie on that side, all `rates` are returned.
    """
    is_pairs = density < PAIRS_END
    side = [rate for rate in rates if (rate.density < PAIRS_END) is is_pairs]
    if len(side) < 2:
        return rates
    near, next_to = (side[-1], side[-2]) if is_pairs else (side[0], side[1])
    per_call, per_element = _on_line(near, next_to, PAIRS_END)
    border = dataclasses.replace(
        near,
        density=PAIRS_END,
        seconds_per_call=max(per_call, 0.0),
        seconds_per_element=max(per_element, 0.0),
    )
    return [*side, border] if is_pairs else [border, *side]


def _between(rates: Sequence[CodecRate], density: float) -> tuple[float, float]:
    """Returns (seconds a call, seconds an element) at a density; `rates` ascend in density."""
    if density <= rates[0].density:
        return rates[0].seconds_per_call, rates[0].seconds_per_element
    for low, high in pairwise(rates):
        if density <= high.density:
            return _on_line(low, high, density)
    return rates[-1].seconds_per_call, rates[-1].seconds_per_element


def _on_line(one: CodecRate, other: CodecRate, density: float) -> tuple[float, float]:
    """Returns (seconds a call, seconds an element) at a density, on the line through two rates."""
    share = (density - one.density) / (other.density - one.density)
    return (
        one.seconds_per_call + share * (other.seconds_per_call - one.seconds_per_call),
        one.seconds_per_element + share * (other.seconds_per_element - one.seconds_per_element),
    )


def _from_yaml(mapping: Mapping[Any, Any]) -> ClusterModel:
    """Makes the model from plain values of a YAML file; a `ConfigError` names a wrong key."""
    values = _exact("the cluster", mapping, ClusterModel)
    for kind in ("intra", "inter", "dense"):
        values[kind] = Link(**_exact(kind, values[kind], Link))
    rates = []
    for number, row in enumerate(_typed("codec", values["codec"], list)):
        key = f"codec[{number}]"
        fields = _exact(key, row, CodecRate)
        try:
            one_of("op", fields["op"], tuple(CodecOp))  # `CodecOp(...)` would raise a ValueError
            fields["op"] = CodecOp(fields["op"])
            rates.append(CodecRate(**fields))
        except ConfigError as error:
            raise ConfigError(
                f"{key}.{error.what}", expected=error.expected, got=error.got, remedy=error.remedy
            ) from None
    densities = _typed("ring_densities", values["ring_densities"], dict)
    values["ring_densities"] = {
        form: tuple(_typed(f"ring_densities.{form}", triple, list))
        for form, triple in densities.items()
    }
    fingerprint = _typed("fingerprint", values["fingerprint"], dict)
    values["fingerprint"] = {str(field): str(value) for field, value in fingerprint.items()}
    values["nodes"] = tuple(_typed("nodes", values["nodes"], list))
    return ClusterModel(**values | {"name": str(values["name"]), "codec": tuple(rates)})


def _exact(key: str, value: object, kind: type) -> dict[str, Any]:
    """Returns `value` as a dict, if it is one whose keys are the fields of the dataclass `kind`."""
    mapping = _typed(key, value, dict)
    names = [field.name for field in dataclasses.fields(kind)]
    wrong = mapping.keys() ^ set(names)  # missing or unknown
    if wrong:
        name = min(map(str, wrong))
        raise ConfigError(
            f"{key} {'lacks' if name in names else 'has an unknown key'} {name!r}",
            expected=", ".join(names),
            got=", ".join(map(str, mapping)) or "nothing",
        )
    return dict(mapping)


def _typed[T](key: str, value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        words = {dict: "keys and values", list: "a list"}
        raise ConfigError(f"{key} has the wrong type", expected=words[kind], got=repr(value))
    return value
