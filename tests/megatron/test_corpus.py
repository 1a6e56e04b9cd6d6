"""The corpus: filtering of texts, files, reuse and refusals."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_sparse.errors import DatasetError
from megatron_sparse.megatron import corpus, corpus_text
from tests.commands import run

# Only searched for: some tests must be the first to import megatron.
pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("tokenizers", "megatron")),
    reason="needs tokenizers and megatron-core: pip install 'megatron-sparse[train]'",
)

Documents = list[tuple[str, str]]
# Enough text for the smallest vocabulary; the last document contains the end-of-document token.
DOCUMENTS = [
    *(
        (f"module_{i}.py", f"def function_{i}(x):\n    return x ** {i} + {i * i}\n" * 9)
        for i in range(40)
    ),
    *(
        (f"words_{i}.py", " ".join(f"w{chr(97 + j % 26)}{i}{j * 7 % 100}" for j in range(200)))
        for i in range(20)
    ),
    ("spelled.py", f"END = '{corpus.EOD_TOKEN}'\n" * 30),
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Documents:
    """Replaces the standard library by DOCUMENTS; the list that is returned is read each time."""
    documents = list(DOCUMENTS)
    monkeypatch.setattr(corpus_text, "code", lambda: iter(documents))
    monkeypatch.setattr(corpus_text, "fingerprint", lambda kind: f"{kind} {documents}")
    return documents


def prepare(folder: Path, vocab_size: int = 512) -> corpus.Corpus:
    return corpus.prepare("code", folder, vocab_size)


def test_megatron_reads_back_every_document(tmp_path: Path, small: Documents) -> None:
    from tokenizers import Tokenizer

    made = prepare(tmp_path / "code")
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    dataset = IndexedDataset(str(made.prefix))
    tokenizer = Tokenizer.from_file(str(made.prefix.with_name("tokenizer.json")))
    texts, end = set(), made.vocab_size - 1
    for ids in dataset:
        assert ids[-1] == end
        assert end not in ids[:-1], "only the end of a document is one, even if spelled out"
        texts.add(tokenizer.decode([int(i) for i in ids[:-1]]))
    assert texts == {text for _, text in small}
    assert len(dataset) == made.n_documents == len(small)
    assert sum(len(ids) for ids in dataset) == made.n_tokens
    null = NullTokenizer(made.vocab_size)  # which the training runs use
    assert tokenizer.get_vocab_size() == null.vocab_size == made.vocab_size
    assert null.eod == end


def test_same_sources_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    """Hashes of strings differ from process to process: nothing may depend on their order."""
    script = (
        "import sys, json; from megatron_sparse.megatron import corpus, corpus_text\n"
        "documents = json.load(sys.stdin)\n"
        "corpus_text.code = lambda: iter(documents)\n"
        "corpus.prepare('code', sys.argv[1], 512)\n"
    )
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / seed)],
            input=json.dumps(DOCUMENTS if seed == "1" else DOCUMENTS[::-1]),
            env=os.environ | {"PYTHONHASHSEED": seed},
            text=True,
            check=True,
        )
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / seed).iterdir()} for seed in "12"
    ]
    assert files[0] == files[1]


def test_matching_corpus_is_reused_and_other_sources_replace_it(
    tmp_path: Path, small: Documents
) -> None:
    folder = tmp_path / "code"
    prepare(folder)
    cache = folder / "text" / "cache"
    cache.mkdir(parents=True)
    before = (folder / "text.bin").stat().st_mtime_ns

    assert prepare(folder) == corpus.load(folder)
    assert (folder / "text.bin").stat().st_mtime_ns == before
    assert cache.exists(), "Megatron's index cache belongs to the corpus that is reused"

    small.append(("more.py", "more = 1\n" * 50))
    assert prepare(folder).n_documents == len(DOCUMENTS) + 1
    assert not cache.exists(), "an index cache of the old documents would be read for the new ones"
    assert prepare(folder, 600).vocab_size == 600


def test_damaged_corpus_is_refused_and_made_again(tmp_path: Path, small: Documents) -> None:
    folder = tmp_path / "code"
    made = prepare(folder)
    data = bytearray((folder / "text.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "text.bin").write_bytes(data)
    with pytest.raises(DatasetError, match=r"text\.bin is damaged"):
        corpus.load(folder)
    assert prepare(folder) == made
    (folder / "text.idx").unlink()
    with pytest.raises(DatasetError, match="no such file"):
        corpus.load(folder)
    (folder / corpus.MANIFEST).write_text("{}")
    with pytest.raises(DatasetError, match="manifest") as caught:
        corpus.load(folder)
    assert caught.value.remedy


@pytest.mark.parametrize("point", ["_train_tokenizer", "_write_dataset"])
def test_interrupted_run_leaves_nothing(
    tmp_path: Path, small: Documents, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    folder = tmp_path / "data" / "code"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def prepare_and_interrupt() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(corpus, point, interrupt)
            with pytest.raises(KeyboardInterrupt):
                prepare(folder)

    prepare_and_interrupt()
    assert list(folder.parent.iterdir()) == []

    made = prepare(folder)
    small.append(("more.py", "more = 1\n" * 50))
    prepare_and_interrupt()
    assert corpus.load(folder) == made
    assert list(folder.parent.iterdir()) == [folder]


def test_other_files_are_never_replaced(tmp_path: Path, small: Documents) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.txt").write_text("years of work")
    with pytest.raises(DatasetError, match="something else"):
        prepare(folder)
    assert (folder / "chapter.txt").read_text() == "years of work"
    with pytest.raises(DatasetError, match="something else"):
        prepare(folder / "chapter.txt")
    shutil.rmtree(folder)
    folder.mkdir()
    assert prepare(folder).n_documents == len(DOCUMENTS)


@pytest.mark.parametrize(
    ("kind", "vocab_size", "message"),
    [
        ("poetry", 8192, "kind of corpus"),
        ("code", 511, "out of range"),
        ("code", 65_501, "out of range"),
        ("code", 65_500, "too short"),
    ],
)
def test_refusals(
    tmp_path: Path, small: Documents, kind: str, vocab_size: int, message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        corpus.prepare(kind, tmp_path / "code", vocab_size)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_the_size(
    tmp_path: Path, small: Documents, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("corpus --kind code --vocab-size 512 --output", tmp_path / "code") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{tmp_path}/code: {len(DOCUMENTS)} documents, ")


def test_paragraphs_keep_english_and_drop_the_rest() -> None:
    english = "The order of the items is kept, and a second call returns what the first one did."
    text = f"""
    {english.replace("kept, ", "kept," + chr(10) + "        ")}

    >>> order(items)  # code is not what a reader of English expects here, is it.

    .. image:: badge.svg :target: somewhere :alt: a picture that says that all is well with it.

    one two three four five six seven eight nine ten, and no end of a sentence

    Too short.

    x = {{'a': 1, 'b': 2}} + [i ** 2 for i in range(10)] and so on and so on until it ends.
    """
    kept = list(corpus_text.paragraphs(text))
    assert kept[0] == " ".join(english.split())
    assert not any(">>>" in p or "[i ** 2" in p or "no end" in p for p in kept)
    assert "Too short." not in kept


def test_real_code_is_the_standard_library() -> None:
    documents = dict(corpus_text.code())
    assert "def dumps(" in documents["json/__init__.py"]
    assert not any("test" in Path(name).parts for name in documents)
    # 11 MB in Python 3.12; the smallest distributions leave a few modules out.
    assert sum(map(len, documents.values())) > 4e6


def test_real_prose_is_english_without_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    """One package beside the standard library, to be quick; the others are read the same way."""
    monkeypatch.setattr(corpus_text, "_PROSE_FOLDERS", {"numpy": ("numpy",), "absent": ("absent",)})
    documents = dict(corpus_text.prose())
    paragraphs = [p for text in documents.values() for p in text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))
    assert sum(map(len, paragraphs)) > 1e6
    # Each of the four kinds of source is there: docstrings, topics, packages and licences.
    assert any(name.startswith("python/pydoc_data/") for name in documents)
    assert {"python/json/__init__.py", "numpy/description"} <= documents.keys()
    assert any("dist-info" in name for name in documents)
    # "the" is about one word in 15 of English, and one in 20 or more of technical English.
    words = " ".join(paragraphs).lower().split()
    assert words.count("the") > len(words) / 30


def test_fingerprint_follows_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_text, "_PROSE_FOLDERS", {"numpy": ("numpy",)})
    before = corpus_text.fingerprint("prose"), corpus_text.fingerprint("code")
    assert before[0] != before[1]
    monkeypatch.setattr(corpus_text, "_installed", lambda name: SimpleNamespace(version="999"))
    after = corpus_text.fingerprint("prose"), corpus_text.fingerprint("code")
    assert after[0] != before[0]
    assert after[1] == before[1], "code hangs on the interpreter alone"
