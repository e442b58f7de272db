"""AUROC, normalised entropy and log loss over the rows of all ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc
from torchrec.metrics.ne import compute_ne, get_ne_states

_ETA = 1e-12  # TorchRec's clamp of probabilities in NE


class Scores(NamedTuple):
    """How well clicks were predicted. All three are NaN if a prediction is not a finite number.

    Args:
        auroc: area under the ROC curve; None if all rows have one label.
        ne: normalised entropy, log loss over the entropy of the mean label (He et al., ADKDD 2014); None likewise.
        loss: mean log loss in nats; None without rows.
        samples: rows scored, over all ranks.
    """

    auroc: float | None
    ne: float | None
    loss: float | None
    samples: int

    @property
    def finite(self) -> bool:
        """Whether all predictions were finite numbers."""
        return self.loss is None or math.isfinite(self.loss)


class ClickMetrics:
    """Collects predictions of this rank and scores those of all ranks together, exactly.

    Nothing waits for the device until `compute`, which all ranks must call together, after as many rows each.

    Args:
        max_samples: keep the rows of the last updates only, at least so many, for the scores of a moving window.
    """

    def __init__(self, max_samples: int | None = None) -> None:
        self._max_samples = max_samples
        self.reset()

    def reset(self) -> None:
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._samples = 0

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds the rows of one batch: ``logits`` and ``labels`` [batch]."""
        self._logits.append(logits.detach())
        self._labels.append(labels.detach())
        self._samples += len(labels)
        while self._max_samples is not None and self._samples - len(self._labels[0]) >= self._max_samples:
            self._samples -= len(self._labels.pop(0))
            self._logits.pop(0)

    def compute(self) -> Scores:
        """Scores of the rows of all ranks, the same on every rank."""
        if not self._labels:
            return Scores(None, None, None, 0)
        logits = torch.cat(self._logits).double()
        predictions = torch.where(torch.isfinite(logits), torch.sigmoid(logits), math.nan)
        predictions, labels = _all_ranks(torch.stack([predictions, torch.cat(self._labels).double()]))
        if bool(predictions.isnan().any()):
            return Scores(math.nan, math.nan, math.nan, len(labels))
        states = get_ne_states(labels[None], predictions[None], torch.ones_like(labels)[None], _ETA)
        loss = float(states["cross_entropy_sum"]) * math.log(2) / len(labels)  # TorchRec sums bits
        if not 0 < float(states["pos_labels"]) < len(labels):
            return Scores(None, None, loss, len(labels))
        ne = compute_ne(
            states["cross_entropy_sum"],
            states["weighted_num_samples"],
            states["pos_labels"],
            states["neg_labels"],
            _ETA,
        )
        return Scores(float(binary_auroc(predictions, labels.int())), float(ne), loss, len(labels))


def _all_ranks(rows: Tensor) -> Tensor:
    """Concatenates ``rows`` [2, n] of all ranks along the second dimension."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(world_size)]
    dist.all_gather(parts, rows)
    return torch.cat(parts, dim=1)
