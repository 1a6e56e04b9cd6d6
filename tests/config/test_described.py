"""What `train --help` and the page of the configuration say of each key."""

from __future__ import annotations

import dataclasses
import re

import pytest

from megatron_sparse.config import described
from megatron_sparse.config.run import RunConfig
from megatron_sparse.run.composition import _keys
from tests.commands import run
from tests.integration.configuration_page import PAGE, page

SECTIONS = {"": RunConfig, **described.sections(RunConfig)}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_attribute_is_described(name):
    section = SECTIONS[name]
    assert described.summary(section).endswith(".")
    fields = [field.name for field in dataclasses.fields(section)]
    assert sorted(described.attributes(section)) == sorted(fields)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one", "one"),
        ("one. two.", "one."),
        ("as 1.25, e.g. here, i.e. now. null: two", "as 1.25, e.g. here, i.e. now."),
    ],
)
def test_the_first_sentence(text, line):
    assert described.first_sentence(text) == line


def test_the_page_is_of_this_version():
    """`python -m tests.integration.configuration_page` writes it anew."""
    assert PAGE.read_text("utf-8") == page()


def test_the_page_has_every_key_in_plain_markdown():
    text = PAGE.read_text("utf-8")
    for key in _keys(RunConfig):
        (row,) = re.findall(rf"^\| `{re.escape(key)}` \| `[^|]+` \| [^|]+ \|$", text, re.MULTILINE)
        assert row
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (PAGE.parent / link).is_file(), link


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_has_every_key_in_a_line_with_its_value(flag, capfd):
    assert run(f"train {flag} compression.density=0.5 megatron.seed=7") == 0
    text = capfd.readouterr().out
    assert re.search(r"^  density: 0\.5 +# the fraction of each pruned range", text, re.MULTILINE)
    assert re.search(r"^megatron: \{seed: 7\} +# any flag of Megatron-LM", text, re.MULTILINE)
    for name, section in SECTIONS.items():
        part = text if not name else text.partition(f"\n{name}:\n")[2]
        for key in described.keys(section):
            assert re.search(rf"^ *{key.name}: .*(\n +)?# .", part, re.MULTILINE), key.name
    _, _, shown = text.partition("== Every key")
    assert max(map(len, shown.splitlines())) <= 100
