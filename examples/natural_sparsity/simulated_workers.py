"""What the three scripts of this folder share: n data-parallel workers, one after the other.

All workers hold the same weights and each takes a batch of its own; the weights move by the mean of
their gradients, which is what n processes would do. Every worker's gradients of the last iterations
are written as a gradient dump, a bucket for each embedding and one for all other parameters.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_sparse.sparsity.gradient_dump import GradientDumpWriter, Kind

UNKNOWN = 0
"""The token id of words that are not in the vocabulary."""


def options(description: str, default_out: str) -> argparse.Namespace:
    """The command line of the scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--output", type=Path, default=Path(default_out), help="folder of the gradient dump"
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=None, help="samples of a worker's batch")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--record", type=int, default=3, help="the last so many iterations")
    return parser.parse_args()


def train(
    model: nn.Module,
    loss_of: Callable[[Any], torch.Tensor],
    batch_of: Callable[[torch.Generator], Any],
    args: argparse.Namespace,
) -> None:
    """Trains on all workers' batches, records, and prints the loss at both ends.

    Args:
        model: mutated.
        loss_of: the loss of one batch under the model.
        batch_of: draws a worker's batch.
        args: of `options`.
    """
    dumped = range(args.iterations - args.record + 1, args.iterations + 1)
    writers = [
        GradientDumpWriter(args.output, dumped, rank=rank, world_size=args.workers)
        for rank in range(args.workers)
    ]
    draws = [torch.Generator().manual_seed(1 + rank) for rank in range(args.workers)]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for iteration in range(1, args.iterations + 1):
        means = [torch.zeros_like(parameter) for parameter in model.parameters()]
        loss = 0.0
        for writer, draw in zip(writers, draws, strict=True):
            model.zero_grad()
            own = loss_of(batch_of(draw))
            own.backward()
            loss += own.item() / args.workers
            for mean, parameter in zip(means, model.parameters(), strict=True):
                mean.add_(parameter.grad, alpha=1 / args.workers)
            for name, gradient in buckets(model):
                writer.write(name, iteration, Kind.GRADIENT, gradient)
        for mean, parameter in zip(means, model.parameters(), strict=True):
            parameter.grad = mean
        optimizer.step()
        losses.append(loss)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {args.iterations} iterations")
    print(f"{args.output}: iterations {dumped[0]} to {dumped[-1]} of {args.workers} workers")


def buckets(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The gradients of each embedding, and of everything else as one vector."""
    embeddings = {
        id(module.weight): name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    others = []
    for parameter in model.parameters():
        if id(parameter) in embeddings:
            yield embeddings[id(parameter)], parameter.grad
        else:
            others.append(parameter.grad.flatten())
    yield "others", torch.cat(others)


def library_sources(most_bytes: int) -> Iterator[str]:
    """The modules of Python's own library in alphabetical order, up to so many bytes."""
    left = most_bytes
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if left <= 0:
            return
        text = path.read_text("utf-8", errors="replace")
        left -= len(text)
        yield text


def words(text: str) -> list[str]:
    """Names, numbers and single signs."""
    return re.findall(r"\w+|[^\w\s]", text)


class Vocabulary:
    """Token ids by falling frequency: the common words come first, as in published vocabularies.

    Args:
        sequences: of words.
        size: ids, that of unknown words included.
    """

    def __init__(self, sequences: Sequence[Sequence[str]], size: int) -> None:
        counts = Counter(word for sequence in sequences for word in sequence)
        self._ids = {word: i for i, (word, _) in enumerate(counts.most_common(size - 1), start=1)}

    def __len__(self) -> int:
        return len(self._ids) + 1

    def encode(self, sequence: Sequence[str]) -> torch.Tensor:
        """int64 ids."""
        return torch.tensor([self._ids.get(word, UNKNOWN) for word in sequence])
