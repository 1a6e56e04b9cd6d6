"""A translation model with two sparse embeddings: from Python functions to their bytecode.

    python examples/natural_sparsity/translation.py --output recordings/translation
    megatron-sparse profile recordings/translation

The pairs come from Python's own library: the words of a short function, and the instructions that
the compiler makes of it, with their arguments. An encoder and a decoder of gated recurrent units;
the decoder sees the right words so far.
"""

import ast
import dis

import torch
from simulated_workers import Vocabulary, library_sources, options, train, words
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

WIDTH, HIDDEN, BATCH = 64, 96, 16
SOURCE_WORDS, TARGET_WORDS, CORPUS_BYTES = 12_000, 6_000, 1_500_000
MOST_WORDS = 60


class Translator(nn.Module):
    """Source [B, S] and target so far [B, T] -> logits of the next target word [B, T, V]."""

    def __init__(self, source_words: int, target_words: int) -> None:
        super().__init__()
        self.source = nn.Embedding(source_words, WIDTH)
        self.target = nn.Embedding(target_words, WIDTH)
        self.encoder = nn.GRU(WIDTH, HIDDEN, batch_first=True)
        self.decoder = nn.GRU(WIDTH, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, target_words)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Logits, with the encoder's last state as the decoder's first."""
        _, state = self.encoder(self.source(source))
        hidden, _ = self.decoder(self.target(target), state)
        return self.output(hidden)


def pairs() -> list[tuple[list[str], list[str]]]:
    """Words and instructions of the library's short functions."""
    found = []
    for text in library_sources(CORPUS_BYTES):
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            source = words(" ".join(lines[node.lineno - 1 : node.end_lineno]))
            # A nonlocal name has no meaning outside the function around it.
            if len(source) > MOST_WORDS or "nonlocal" in source:
                continue
            module = compile(ast.Module([node], type_ignores=[]), "library", "exec")
            code = next(c for c in module.co_consts if hasattr(c, "co_code"))
            found.append((source, instructions(code)[:MOST_WORDS]))
    return found


def instructions(code: object) -> list[str]:
    """Names of instructions, each followed by its argument where that is a name or a constant."""
    spelt = []
    for instruction in dis.get_instructions(code):
        spelt.append(instruction.opname)
        if instruction.argrepr and "code object" not in instruction.argrepr:
            spelt.append(instruction.argrepr)
    return spelt


def main() -> None:
    """Trains and records."""
    args = options("From Python functions to bytecode.", "recordings/translation")
    torch.manual_seed(0)
    texts = pairs()
    reads = Vocabulary([source for source, _ in texts], SOURCE_WORDS)
    writes = Vocabulary([target for _, target in texts], TARGET_WORDS)
    encoded = [(reads.encode(source), writes.encode(target)) for source, target in texts]
    model, batch = Translator(len(reads), len(writes)), args.batch or BATCH

    def batch_of(draw: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of sequences."""
        return [encoded[i] for i in torch.randint(len(encoded), (batch,), generator=draw).tolist()]

    def loss_of(drawn: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        source = pad_sequence([a for a, _ in drawn], batch_first=True)
        target = pad_sequence([b for _, b in drawn], batch_first=True, padding_value=-1)
        logits = model(source, target[:, :-1].clamp(min=0))
        return cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=-1)

    train(model, loss_of, batch_of, args)


if __name__ == "__main__":
    main()
