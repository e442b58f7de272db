"""Which evaluation of a run was its best, and whether the run should go on.

Both follow from the evaluations alone. A run that continues has them from its checkpoint, and so decides as an unbroken
one does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowtt_torchrec.training.config import TrainingConfig

Evaluations = Sequence[Mapping[str, Any]]


def best_evaluation(evaluations: Evaluations) -> Mapping[str, Any] | None:
    """The one of least NE, the first of equals; None while none has an NE."""
    return min((entry for entry in evaluations if entry["ne"] is not None), key=lambda entry: entry["ne"], default=None)


def reason_to_stop(config: TrainingConfig, evaluations: Evaluations) -> str | None:
    """Why training should end before its last epoch, in words; None if it should not.

    Args:
        config: ``patience`` and ``target_auroc`` are used.
        evaluations: all so far, in their order.
    """
    if config.target_auroc is not None:
        for entry in evaluations:
            if entry["auroc"] is not None and entry["auroc"] >= config.target_auroc:
                return (
                    f"step {entry['step']} has AUROC {entry['auroc']:.6f}, which reaches training.target_auroc "
                    f"({config.target_auroc})"
                )
    best = best_evaluation(evaluations)
    if config.patience is None or best is None:
        return None
    since = sum(entry["step"] > best["step"] for entry in evaluations)
    if since < config.patience:
        return None
    return f"{since} evaluations since step {best['step']} had no better NE (training.patience is {config.patience})"
