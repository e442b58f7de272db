from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.metrics import log_loss, roc_auc_score

from flowtt_torchrec.training.console import show_scores
from flowtt_torchrec.training.divergence import FirstNonFiniteLoss, non_finite_tensor
from flowtt_torchrec.training.loop import scores_entry
from flowtt_torchrec.training.metrics import ClickMetrics, Scores


def _rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, generator=generator).round(decimals=1)  # with ties
    return logits, (torch.rand(count, generator=generator) < torch.sigmoid(logits - 1)).float()


def _expected(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, float, float]:
    loss = log_loss(labels, torch.sigmoid(logits.double()))
    mean = labels.double().mean().item()
    entropy = -mean * math.log(mean) - (1 - mean) * math.log(1 - mean)
    return roc_auc_score(labels, logits), loss / entropy, loss


def test_scores_are_those_of_all_batches() -> None:
    logits, labels = _rows(1000)
    metrics = ClickMetrics()
    for start in range(0, 1000, 300):
        metrics.update(logits[start : start + 300], labels[start : start + 300])
    scores = metrics.compute()
    assert scores.samples == 1000
    assert scores[:3] == pytest.approx(_expected(logits, labels), rel=1e-6)


def test_a_window_keeps_whole_batches() -> None:
    logits, labels = _rows(1000)
    metrics = ClickMetrics(max_samples=250)
    for start in range(0, 1000, 100):
        metrics.update(logits[start : start + 100], labels[start : start + 100])
    assert metrics.compute()[:3] == pytest.approx(_expected(logits[700:], labels[700:]), rel=1e-6)


def test_without_two_classes_there_is_a_loss_only() -> None:
    metrics = ClickMetrics()
    metrics.update(torch.zeros(3), torch.zeros(3))
    scores = metrics.compute()
    assert (scores.auroc, scores.ne) == (None, None)
    assert scores.loss == pytest.approx(math.log(2))
    assert show_scores(scores) == "loss 0.6931  NE -  AUROC -"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_predictions_that_are_no_numbers_have_no_scores(bad: float) -> None:
    logits, labels = _rows(100)
    logits[3] = bad
    metrics = ClickMetrics()
    metrics.update(logits, labels)
    scores = metrics.compute()
    assert not scores.finite
    assert scores_entry(scores) == {"auroc": None, "ne": None, "loss": None, "samples": 100}
    assert show_scores(scores) == "loss NaN  NE NaN  AUROC NaN"


def test_without_rows_there_is_nothing() -> None:
    metrics = ClickMetrics()
    metrics.update(*_rows(5))
    metrics.reset()
    assert metrics.compute().samples == 0


def _rank(rank: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    logits, labels = _rows(400)
    metrics = ClickMetrics()
    metrics.update(logits[rank::2], labels[rank::2])
    first_bad = FirstNonFiniteLoss(torch.device("cpu"))
    found: list[object] = [first_bad.step()]
    for step in range(1, 6):  # rank 1 has it first
        first_bad.update(step, torch.tensor(math.inf if step >= 5 - rank else 0.5))
    found.append(first_bad.step())
    for value in (1.0, math.nan, math.inf):
        tensors = {"a": torch.ones(3), "b": {"c": torch.tensor([0.0, value if rank else 1.0]), "n": 3}}
        found.append(non_finite_tensor(tensors))
    torch.save((tuple(metrics.compute()), found), f"{results}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_are_scored_together_and_agree_on_what_is_not_finite(tmp_path: Path) -> None:
    mp.start_processes(_rank, (str(tmp_path / "store"), str(tmp_path)), nprocs=2, start_method="forkserver")
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert [found for _, found in ranks] == [[None, 4, None, "b.c", "b.c"]] * 2
    first, second = (Scores(*scores) for scores, _ in ranks)
    assert first == second
    assert first.samples == 400
    assert first[:3] == pytest.approx(_expected(*_rows(400)), rel=1e-6)
