"""An LSTM language model over words, whose two embeddings have naturally sparse gradients.

    python examples/natural_sparsity/lstm_language_model.py --output recordings/lstm
    megatron-sparse profile recordings/lstm

It learns to guess the next word of Python's own library. As in the model that ZEN's table 1 names,
the softmax is sampled: a step touches the rows of the words that it read, of those that followed,
and of some drawn as wrong answers, and no others.
"""

import torch
from simulated_workers import Vocabulary, library_sources, options, train, words
from torch import nn
from torch.nn.functional import cross_entropy

LENGTH, WIDTH, HIDDEN, BATCH = 20, 64, 128, 32
VOCABULARY, NEGATIVES, CORPUS_BYTES = 20_000, 256, 1_500_000


class LanguageModel(nn.Module):
    """Words [B, L] and candidates [C] -> scores [B, L, C]."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.read = nn.Embedding(vocabulary, WIDTH)
        self.lstm = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
        self.project = nn.Linear(HIDDEN, WIDTH)
        self.guess = nn.Embedding(vocabulary, WIDTH)

    def forward(self, text: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Scores of the candidates as the word that follows."""
        hidden, _ = self.lstm(self.read(text))
        return self.project(hidden) @ self.guess(candidates).T


def main() -> None:
    """Trains and records."""
    args = options("LSTM language model with sparse embeddings.", "recordings/lstm")
    torch.manual_seed(0)
    corpus = [word for text in library_sources(CORPUS_BYTES) for word in words(text)]
    vocabulary = Vocabulary([corpus], VOCABULARY)
    text = vocabulary.encode(corpus)
    model, batch = LanguageModel(len(vocabulary)), args.batch or BATCH

    def batch_of(draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Words, and candidates of which the first are the right answers in turn."""
        starts = torch.randint(text.numel() - LENGTH - 1, (batch,), generator=draw)
        windows = text[starts[:, None] + torch.arange(LENGTH + 1)]
        # Log-uniform: about as often as words by falling frequency occur.
        wrong = (
            torch.rand(NEGATIVES, generator=draw)
            .mul(torch.tensor(float(len(vocabulary))).log())
            .exp()
            .long()
            - 1
        )
        candidates, place = torch.cat([windows[:, 1:].flatten(), wrong]).unique(return_inverse=True)
        return windows[:, :-1], candidates, place[: batch * LENGTH]

    def loss_of(drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        read, candidates, answers = drawn
        return cross_entropy(model(read, candidates).flatten(0, 1), answers)

    train(model, loss_of, batch_of, args)


if __name__ == "__main__":
    main()
