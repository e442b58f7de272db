"""One training of a small DLRM with a contender's tables, scored on validation and test after every epoch."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.quality.contenders import CONTENDERS, UNCOMPRESSED, num_weights
from benchmarks.quality.data import RECIPES, Dataset, Part, load
from benchmarks.quality.tables import Table
from flowtt_torchrec import BatchedTTEmbeddingBags
from flowtt_torchrec.cores import default_std
from flowtt_torchrec.datasets.base import BestMetrics
from flowtt_torchrec.datasets.planted import score

MODEL_RATE = 0.02  # of all but the contender's tables, whose rate is searched
HIDDEN = 64
PATIENCE = 2  # epochs without a better validation
_EVALUATION_BATCH = 8192


@dataclass(frozen=True)
class Trial:
    """What is trained; equal trials give equal results.

    Attributes:
        dataset: name of the data set.
        order: numbering of ids.
        contender: name of the contender.
        ratio: weights of the dense tables over those that the contender may have.
        rate: learning rate of the contender's tables.
        seed: of split, numbering, initial weights and order of rows.
        max_rows: of the data set, 0 for all.
        max_epochs: at most so many epochs, 0 for as many as the recipe says.
    """

    dataset: str
    order: str
    contender: str
    ratio: float
    rate: float
    seed: int
    max_rows: int = 0
    max_epochs: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a training went, at the epoch that is best by validation.

    Attributes:
        epoch: that epoch, from 1.
        validation_ne: normalised entropy (He et al., ADKDD 2014).
        test_auc: area under the ROC curve on the test part.
        test_ne: normalised entropy there.
        best_ne: what the true probabilities score there, where they are known.
        weights: of the contender's tables.
        dense_weights: of the same tables, uncompressed.
        step_ms: CPU time of a training step, one thread, mean over all.
    """

    epoch: int
    validation_ne: float
    test_auc: float
    test_ne: float
    best_ne: float | None
    weights: int
    dense_weights: int
    step_ms: float


class Model(nn.Module):
    """Tables, interaction, a network of one hidden layer: a DLRM (Naumov et al., 2019) small enough for many trials.

    The network sees all rows, side by side, and how they meet: all dot products of two, or, where there are two columns
    and ``product`` is set, the products of their elements (He et al., WWW 2017).

    Args:
        data: sizes of columns.
        dim: columns of tables.
        tables: of the compressed columns.
        product: as above.
    """

    starts: Tensor
    pairs: Tensor

    def __init__(self, data: Dataset, dim: int, tables: nn.Module, product: bool) -> None:
        super().__init__()
        self.tables = tables
        self.compressed = list(data.compressed)
        self.others = [column for column in range(len(data.sizes)) if column not in data.compressed]
        self.product = product
        sizes = [data.sizes[column] for column in self.others]
        self.register_buffer("starts", torch.tensor([0, *itertools.accumulate(sizes[:-1])][: len(sizes)]))
        self.small = nn.Embedding(max(1, sum(sizes)), dim)
        with torch.no_grad():
            for rows, size in zip(self.small.weight.split(sizes or [1]), sizes or [1]):
                rows.uniform_(-1, 1).mul_(default_std(size) * 3**0.5)
        features = data.train.dense.shape[1]
        self.bottom = nn.Linear(features, dim) if features else None
        vectors = len(data.sizes) + bool(features)
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, offset=1))
        meetings = dim if product else vectors * (vectors - 1) // 2
        self.top = nn.Sequential(nn.Linear(vectors * dim + meetings, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, part: Part) -> Tensor:
        """Logits ``[rows]``."""
        vectors = [self.tables(part.ids[:, self.compressed])]
        if self.others:
            vectors.append(self.small(part.ids[:, self.others] + self.starts))
        if self.bottom is not None:
            vectors.append(torch.relu(self.bottom(part.dense)).unsqueeze(1))
        x = torch.cat(vectors, dim=1)
        if self.product:
            meetings = x[:, 0] * x[:, 1]
        else:
            meetings = torch.bmm(x, x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x.flatten(1), meetings], dim=1)).squeeze(1)


def train(trial: Trial) -> Outcome:
    """Trains and scores a contender.

    Raises:
        DoesNotFitError: if the contender has no tables of so few weights.
    """
    recipe = RECIPES[trial.dataset]
    data = load(trial.dataset, trial.order, trial.seed, trial.max_rows)
    torch.manual_seed(trial.seed)
    about = [
        Table(data.sizes[column], recipe.dim, data.counts[column], data.label_rates[column])
        for column in data.compressed
    ]
    full = sum(table.rows * table.dim for table in about)
    tables = CONTENDERS[trial.contender](about, int(full / trial.ratio))
    weights = num_weights(tables)
    if trial.contender != UNCOMPRESSED and weights > full / trial.ratio:
        raise AssertionError(f"{trial.contender} has {weights:,} weights, {full / trial.ratio:,.0f} are allowed")
    model = Model(data, recipe.dim, tables, recipe.product)
    optimizer = _optimizer(model, trial.rate)
    generator = torch.Generator().manual_seed(trial.seed)
    best: tuple[int, float, BestMetrics] | None = None
    seconds, steps = 0.0, 0
    for epoch in range(1, (trial.max_epochs or recipe.max_epochs) + 1):
        model.train()
        start = time.thread_time()
        for batch in data.train.batches(recipe.batch_size, generator):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
            optimizer.step()
            steps += 1
        seconds += time.thread_time() - start
        validation = evaluate(model, data.validation).ne
        if best is None or validation < best[1]:
            best = epoch, validation, evaluate(model, data.test)
        elif epoch - best[0] >= PATIENCE or not np.isfinite(validation):
            break
    assert best is not None
    test = best[2]
    return Outcome(best[0], best[1], test.auroc, test.ne, data.best_ne, weights, full, 1e3 * seconds / steps)


def _optimizer(model: Model, rate: float) -> torch.optim.Optimizer:
    """Adagrad on all weights but those with a fused optimizer, which are given their rate."""
    fused: set[int] = set()
    for module in model.tables.modules():
        if isinstance(module, BatchedTTEmbeddingBags):
            module.set_learning_rate(rate)
            fused.update(id(p) for p in module.parameters())
    tables = [p for p in model.tables.parameters() if id(p) not in fused]
    own = {id(p) for p in model.tables.parameters()}
    others = [p for p in model.parameters() if id(p) not in own]
    groups = [{"params": others, "lr": MODEL_RATE}, *([{"params": tables, "lr": rate}] if tables else [])]
    return torch.optim.Adagrad(groups)


@torch.no_grad()
def evaluate(model: Model, part: Part) -> BestMetrics:
    """AUC and normalised entropy of a part of the data."""
    model.eval()
    logits = torch.cat([model(batch) for batch in part.batches(_EVALUATION_BATCH)]).double()
    probabilities = torch.sigmoid(logits).clamp(1e-7, 1 - 1e-7)
    return score(probabilities.numpy(), part.labels.numpy())
