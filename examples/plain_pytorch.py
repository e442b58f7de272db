"""`TTEmbeddingBag` in the place of `nn.EmbeddingBag`, in a model without TorchRec; torch alone is needed.

python examples/plain_pytorch.py

Documents are classified by their pairs of neighbouring words, hashed into 10,000,000 rows, as fastText does. A dense
table of 64 columns would take 2.56 GB, and the optimizer's state as much again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flowtt_torchrec import TTEmbeddingBag

ROWS, DIM, CLASSES = 10_000_000, 64, 4
DOCUMENTS, WORDS, VOCABULARY = 64, 40, 2_000  # documents a batch, words of each, known words


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = TTEmbeddingBag(ROWS, DIM, rank=32, mode="mean")  # was: nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.out = nn.Linear(DIM, CLASSES)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.out(self.pairs(pairs))


def documents(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of a batch's pairs, int64 ``[DOCUMENTS, WORDS - 1]``, and classes, int64 ``[DOCUMENTS]``.

    After a word every class prefers one of its own.
    """
    labels = torch.randint(CLASSES, (DOCUMENTS,), generator=generator)
    words = [torch.randint(50, (DOCUMENTS,), generator=generator)]
    for _ in range(WORDS - 1):
        preferred = (words[-1] * 7 + labels * 13 + 1) % 50
        other = torch.randint(VOCABULARY, (DOCUMENTS,), generator=generator)
        words.append(torch.where(torch.rand(DOCUMENTS, generator=generator) < 0.1, preferred, other))
    text = torch.stack(words, dim=1)
    return (text[:, :-1] * 2_654_435_761 + text[:, 1:] * 40_503) % ROWS, labels


torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # any torch optimizer: the cores are a small parameter
for step in range(101):
    pairs, labels = documents(generator)
    loss = nn.functional.cross_entropy(model(pairs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}")

with torch.no_grad():
    pairs, labels = documents(generator)
    accuracy = (model(pairs).argmax(dim=1) == labels).float().mean().item()
dense, cores = ROWS * DIM * 4, model.pairs.spec.num_bytes()
print(f"accuracy {accuracy:.0%} of {CLASSES} classes; table {cores / 1e6:.1f} MB in place of {dense / 1e6:,.0f} MB")
