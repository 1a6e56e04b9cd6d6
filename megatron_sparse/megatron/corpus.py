"""A real training corpus, made from files that come with this project's dependencies.

`code` is the source of the Python standard library: training data as for a StarCoder-like model.
`prose` is English: docstrings, the language reference that ships with the interpreter
(`pydoc_data`), package descriptions and licences, taken from the standard library and from packages
that `megatron-sparse[train]` always brings. Nothing is downloaded.

A byte-level BPE is trained on the text itself and Megatron's indexed dataset holds the token ids,
so Megatron needs `--tokenizer-type NullTokenizer --vocab-size V` and nothing else: its
NullTokenizer takes id V - 1 as the end of a document, which is where this module puts it.

The same interpreter and package versions give the same bytes: files are read in sorted order, of a
repeated paragraph of prose only the first copy is kept, and documents are ordered by a hash of
their names. So each part of Megatron's contiguous split (training, validation, test) sees every
source.

    megatron-sparse corpus --kind code --output data/code
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from rich.console import Console

from megatron_sparse.errors import DatasetError
from megatron_sparse.extras import installed_version, require
from megatron_sparse.megatron import corpus_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

type Kind = Literal["code", "prose"]
KINDS: tuple[str, ...] = get_args(Kind.__value__)

EOD_TOKEN = "<|endoftext|>"
MANIFEST = "manifest.json"
MIN_VOCAB_SIZE = 512  # 256 bytes, the end of a document, and room for some merges
# Megatron takes 4 bytes a token instead of 2 from here on; no corpus of a few MB needs that.
MAX_VOCAB_SIZE = 65_500

_FILES = ("text.bin", "text.idx", "tokenizer.json")
_BATCH = 64
_COMMAND = "megatron-sparse corpus"


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, as Megatron takes it.

    Attributes:
        prefix: for `--data-path`: the path of the `.bin` and `.idx` without their suffix.
        vocab_size: for `--vocab-size`; every id is below it, and the last one ends each document.
        n_documents: documents in the dataset.
        n_tokens: tokens in the dataset, ends of documents included.
        fingerprint: digest of all that decides the corpus's text and ids.
    """

    prefix: Path
    vocab_size: int
    n_documents: int
    n_tokens: int
    fingerprint: str


def prepare(kind: Kind, out_dir: str | Path, vocab_size: int = 8192) -> Corpus:
    """Makes the corpus in `out_dir`, unless the same corpus is there already.

    It is made in a temporary folder, which is renamed at the end, so an interrupted run leaves
    `out_dir` unchanged. A corpus of other sources, kind or vocabulary is replaced, together with
    the index cache that Megatron keeps inside it. Takes about 10 seconds for code and 20 for
    prose, and shows its progress on stderr.

    Args:
        kind: `code` or `prose`.
        out_dir: folder of the corpus; made with its parents.
        vocab_size: number of token ids, the end of a document included.

    Raises:
        DatasetError: `kind` or `vocab_size` is refused, or `out_dir` holds something else.
        DependencyError: tokenizers or megatron-core is not installed.
    """
    _check_request(kind, vocab_size)
    require("tokenizers", "turns text into ids", "train")
    require("megatron.core", "writes the dataset", "train")
    out_dir = Path(out_dir)
    fingerprint = _fingerprint(kind, vocab_size)
    try:
        corpus = load(out_dir)
    except DatasetError:
        _check_replaceable(out_dir)
    else:
        if corpus.fingerprint == fingerprint:
            return corpus

    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
            made = Path(scratch) / "new"
            made.mkdir()
            _make(kind, vocab_size, fingerprint, made)
            if out_dir.exists():
                out_dir.rename(Path(scratch) / "old")  # deleted with the temporary folder
            made.rename(out_dir)
    except OSError as error:
        raise DatasetError(
            f"the corpus cannot be written to {out_dir}",
            expected="a folder that can be made and written",
            got=str(error),
            remedy="give another folder, or make room",
        ) from error
    return load(out_dir)


def load(out_dir: str | Path) -> Corpus:
    """Reads a prepared corpus's manifest (`MANIFEST`) and checks each file's digest against it.

    Raises:
        DatasetError: there is no corpus in `out_dir`, or its manifest or a file is missing or
            damaged.
    """
    out_dir = Path(out_dir)
    path = out_dir / MANIFEST
    remedy = f"make it: {_COMMAND} --kind code|prose --output {out_dir}"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
        names = ("vocab_size", "n_documents", "n_tokens", "fingerprint")
        fields = {name: manifest[name] for name in names}
        digests = {name: manifest["files"][name] for name in _FILES}
    except FileNotFoundError:
        raise DatasetError(
            f"there is no corpus in {out_dir}", expected=path, got="no such file", remedy=remedy
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(
            f"the manifest of the corpus in {out_dir} cannot be read",
            expected=f"the {MANIFEST} that prepare() writes",
            got=f"{type(error).__name__}: {error}",
            remedy=f"remove the folder and {remedy}",
        ) from error
    for name, digest in digests.items():
        found = _digest(out_dir / name) if (out_dir / name).is_file() else "no such file"
        if found != digest:
            raise DatasetError(
                f"{out_dir / name} is damaged", expected=digest, got=found, remedy=remedy
            )
    return Corpus(prefix=out_dir / "text", **fields)


def _check_request(kind: str, vocab_size: int) -> None:
    """Refuses an unknown kind of corpus, and a vocabulary that is too small or too large."""
    if kind not in KINDS:
        raise DatasetError(
            "the kind of corpus is unknown", expected=" | ".join(KINDS), got=repr(kind)
        )
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise DatasetError(
            "the vocabulary size is out of range",
            expected=f"{MIN_VOCAB_SIZE} <= vocab_size <= {MAX_VOCAB_SIZE}",
            got=vocab_size,
        )


def _check_replaceable(out_dir: Path) -> None:
    """Refuses a folder that `prepare` would replace, unless it is a corpus or empty."""
    if not out_dir.exists():
        return
    if not out_dir.is_dir() or (any(out_dir.iterdir()) and not (out_dir / MANIFEST).is_file()):
        raise DatasetError(
            f"{out_dir} holds something else",
            expected="no such folder, an empty one, or a corpus made before",
            got="a file" if out_dir.is_file() else "a folder without a " + MANIFEST,
            remedy="give another folder, or remove this one",
        )


def _make(kind: Kind, vocab_size: int, fingerprint: str, folder: Path) -> None:
    """Writes dataset, tokenizer and manifest into `folder`."""

    def hash_of_name(document: corpus_text.Document) -> bytes:
        return hashlib.sha256(document[0].encode()).digest()

    read = corpus_text.code if kind == "code" else corpus_text.prose
    # In the order of hashes, so that each part of the split sees every source.
    texts = [text for _, text in sorted(read(), key=hash_of_name)]

    tokenizer = _train_tokenizer(texts, vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    n_tokens = _write_dataset(texts, tokenizer, vocab_size, folder / "text")
    manifest = {
        "kind": kind,
        "vocab_size": vocab_size,
        "eod": vocab_size - 1,
        "n_documents": len(texts),
        "n_tokens": n_tokens,
        "fingerprint": fingerprint,
        "files": {name: _digest(folder / name) for name in _FILES},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")


def _train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE; its last id is EOD_TOKEN, which ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # without the end of a document
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with Console(stderr=True).status("train the BPE"):  # the trainer reports no progress
        tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([EOD_TOKEN])
    # Text in a document that looks like EOD_TOKEN is encoded as text, not as the end.
    tokenizer.encode_special_tokens = True
    if tokenizer.token_to_id(EOD_TOKEN) != vocab_size - 1:
        raise DatasetError(
            "the text is too short for this vocabulary",
            expected=f"{vocab_size} tokens",
            got=f"{tokenizer.get_vocab_size()} tokens from {sum(map(len, texts))} characters",
            remedy="ask for a smaller vocab_size",
        )
    return tokenizer


def _write_dataset(texts: list[str], tokenizer: Tokenizer, vocab_size: int, prefix: Path) -> int:
    """Writes `prefix`.bin and .idx, one document for each text; returns the number of tokens."""
    import torch

    with warnings.catch_warnings():
        # Megatron warns in each module that Transformer Engine is missing.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
    n_tokens = 0
    for batch in corpus_text.shown(batched(texts, _BATCH), "encode"):
        for encoding in tokenizer.encode_batch_fast(list(batch)):
            ids = [*encoding.ids, vocab_size - 1]
            builder.add_document(torch.tensor(ids), [len(ids)])
            n_tokens += len(ids)
    builder.finalize(f"{prefix}.idx")
    return n_tokens


def _fingerprint(kind: Kind, vocab_size: int) -> str:
    tokenizers = installed_version("tokenizers")
    facts = f"{corpus_text.fingerprint(kind)} {vocab_size} tokenizers {tokenizers}"
    return hashlib.sha256(facts.encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
