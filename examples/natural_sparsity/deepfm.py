"""DeepFM, a recommendation model: embeddings of categories, of which a batch holds few.

    python examples/natural_sparsity/deepfm.py --output recordings/deepfm
    megatron-sparse profile recordings/deepfm

The data are made: 26 categorical fields as in Criteo's, whose values occur by Zipf's law, each with
a hidden weight; the click is drawn from the sum. A factorisation machine (pairs of embeddings) and
a small network share the embeddings.
"""

import torch
from simulated_workers import options, train
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

FIELDS, VALUES, WIDTH, HIDDEN, BATCH = 26, 4000, 16, 64, 256
EXPONENT = 1.1


class DeepFM(nn.Module):
    """Row numbers [B, FIELDS] -> logit of a click [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Embedding(FIELDS * VALUES, WIDTH)
        self.linear = nn.Embedding(FIELDS * VALUES, 1)
        nn.init.normal_(self.factors.weight, std=0.05)
        nn.init.zeros_(self.linear.weight)
        self.network = nn.Sequential(
            nn.Linear(FIELDS * WIDTH, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """First order, pairs, and the network."""
        factors = self.factors(rows)
        pairs = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(1)
        deep = self.network(factors.flatten(1)).squeeze(1)
        return self.linear(rows).sum((1, 2)) + pairs + deep


def main() -> None:
    """Trains and records."""
    args = options("DeepFM on made clicks.", "recordings/deepfm")
    torch.manual_seed(0)
    model, batch = DeepFM(), args.batch or BATCH
    popularity = torch.arange(1, VALUES + 1).double() ** -EXPONENT
    reached = (popularity / popularity.sum()).cumsum(0)
    hidden = torch.randn(FIELDS * VALUES)
    first_row = torch.arange(FIELDS) * VALUES

    def batch_of(draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Row numbers, and clicks."""
        chance = torch.rand(batch, FIELDS, generator=draw, dtype=torch.float64)
        rows = torch.searchsorted(reached, chance).clamp_(max=VALUES - 1) + first_row
        score = hidden[rows].sum(1) / FIELDS**0.5
        return rows, (torch.rand(batch, generator=draw) < score.sigmoid()).float()

    def loss_of(drawn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        rows, clicks = drawn
        return binary_cross_entropy_with_logits(model(rows), clicks)

    train(model, loss_of, batch_of, args)


if __name__ == "__main__":
    main()
