"""The layouts that docs/parallelism.md calls refused, and its table. Starts no process."""

from __future__ import annotations

import re

import pytest

from megatron_sparse.errors import ConfigError, HostError
from megatron_sparse.megatron.arguments import OTHER_WRAPS
from megatron_sparse.run import composition, preparation
from tests.doc_tables import rows_with_tests, untrue_rows
from tests.megatron.test_parallel import LAYOUTS

PAGE = "docs/parallelism.md"
MUST_HAVE = (
    "tensor parallel",
    "pipeline parallel",
    "virtual pipeline",
    "context parallel",
    "expert parallel",
    "sequence parallel",
    "tied embeddings",
    "microbatches",
    "all-reduce",
    "reduce-scatter",
    "num-distributed-optimizer-instances",
    "reduce-scatter-with-fp32-accumulation",
    "ddp-average-in-collective",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "bf16",
    "fp32",
    "params_with_extra_main_grads",
    "use-megatron-fsdp",
    "use-torch-fsdp2",
    "save-wgrads-interval",
    "tp_group",
    "one rank",
)


def test_every_row_of_the_table_works_or_is_refused_and_names_tests_that_exist():
    rows = rows_with_tests(PAGE)
    assert len(rows) > 20
    assert untrue_rows(PAGE) == []
    for row, _ in rows:
        outcome = row.strip("|").split(" | ")[2].strip()
        assert outcome.startswith(("works", "refused: `ConfigError`", "refused: `HostError`")), row


def test_the_table_has_a_row_for_everything():
    table = "\n".join(" ".join(row.split(" | ")[:2]) for row, _ in rows_with_tests(PAGE)).lower()
    assert [name for name in MUST_HAVE if name not in table] == []


def test_the_table_and_the_tests_have_the_same_layouts():
    table = "\n".join(row for row, _ in rows_with_tests(PAGE))
    assert set(re.findall(r"test_dense_is_megatron\[(\w+)\]", table)) == set(LAYOUTS)


@pytest.mark.parametrize("key", OTHER_WRAPS)
def test_fsdp_is_refused_before_a_rank_starts(key, tmp_path):
    config = composition.compose(["model=gpt_tiny", "data=mock", f"megatron.{key}=true"])
    with pytest.raises(ConfigError, match=rf"megatron\.{key}") as caught:
        preparation.preflight(config)
    assert "plugin=false" in str(caught.value)


def _fsdp_classes():
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    return TorchFullyShardedDataParallel, FullyShardedDataParallel


@pytest.mark.parametrize("index", [0, 1])
def test_attach_refuses_a_model_in_fsdp(index):
    """The class is Megatron's own; an instance of it would need a GPU."""
    from megatron_sparse.megatron.buckets import check_supported

    kind = _fsdp_classes()[index]
    with pytest.raises(HostError) as caught:
        check_supported(kind.__new__(kind))
    assert kind.__qualname__ in str(caught.value)
    assert "--use-megatron-fsdp" in str(caught.value)
    assert "--use-torch-fsdp2" in str(caught.value)
