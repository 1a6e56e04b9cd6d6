"""The decoders under sanitizers: `scripts/fuzz.sh`, and that it finds planted defects.

`scripts/test.sh` runs the script itself, after the tests, for a minute. Here are its quick parts
and, marked slow, the proof that a planted defect is found.
"""

import random
import re
import shutil
import sys
from collections import Counter

import pytest

from megatron_sparse.cuda_ext import build
from tests.cuda_ext.fuzz_records import DECODERS
from tests.programs import ROOT, ended, with_variables

pytestmark = pytest.mark.timeout(1200)  # the library is compiled with sanitizers first
COPIED = ("megatron_sparse", "cuda_ext", "triton_kernels", "scripts", "tests/cuda_ext")


def fuzz(root, seconds):
    command = ["bash", "scripts/fuzz.sh", str(seconds)]
    return ended(command, None, cwd=root, env=with_variables(PYTHON=sys.executable))


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_refuses_or_is_right(name):
    """The inputs of `fuzz_records.py`, without sanitizers: finds only wrong answers."""
    refused = Counter(DECODERS[name](random.Random(seed)) for seed in range(400))
    assert min(refused[True], refused[False]) > 30


@pytest.mark.slow
def test_nothing_is_found():
    done = fuzz(ROOT, 60)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (executions,) = re.findall(r"(\d+) executions, 0 crashes", done.stdout)
    assert int(executions) > 1000  # a tenth of the runs of a loaded machine in a minute


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "check"),
    [
        ("decode_records.cpp", "index >= limit"),
        ("decode_records.cpp", "after - before != kernel.count_bits(words, kTileSide)"),
        ("decode_records.cpp", "block[i] != 0"),
        ("record_check.h", "record.sections.payload > available"),
        ("rice_records.cpp", "element >= parts.numel"),
        ("record_check.h", "end > all_words"),
        ("hash_bitmap.cpp", "read_at<uint64_t>(words, word_count - 1) >> in_last != 0"),
    ],
)
def test_a_missing_check_is_found(tmp_path, source, check):
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("_lib"))
    planted = tmp_path / "cuda_ext" / "csrc" / source
    assert planted.read_text().count(check) == 1
    planted.write_text(planted.read_text().replace(check, "false"))
    done = fuzz(tmp_path, 60)
    assert done.returncode == 1, done.stdout[-3000:]
    assert re.search("Sanitizer|runtime error|AssertionError", done.stderr)


@pytest.mark.parametrize("argument", ["soon", "-1", ""])
def test_an_unknown_argument_is_one_error(argument):
    done = fuzz(ROOT, argument)
    assert done.returncode == 2
    assert "an argument is unknown" in done.stderr


def test_a_sanitized_library_is_not_built_into_the_package(capsys):
    assert build.main(["--cuda", "off", "--sanitize"]) != 0
    assert "name one with --out" in capsys.readouterr().err
