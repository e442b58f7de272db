"""Runs many trials in worker processes: a search of the learning rate by validation, then more seeds at the best rate.

Every finished training is a line of JSON in a file, from which a run that starts again takes what is there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from benchmarks.quality.contenders import CONTENDERS, UNCOMPRESSED
from benchmarks.quality.data import RECIPES, load_rows
from benchmarks.quality.tables import DoesNotFitError
from benchmarks.quality.training import Outcome, Trial, train

RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_FIRST_RATES = (0.03, 0.1, 0.3)

Finished: TypeAlias = dict[Trial, "Outcome | str"]
"""What came of each trial: an outcome, or why there is none."""


@dataclass(frozen=True)
class Job:
    """A contender at a ratio: the search of its rate on the first seed, and the other seeds.

    Attributes:
        trial: the first seed; its rate is not looked at.
        seeds: how many.
    """

    trial: Trial
    seeds: int

    def name(self) -> str:
        return f"{self.trial.dataset} 1/{self.trial.ratio:g} {self.trial.contender} ({self.trial.order})"


def jobs(
    datasets: Sequence[str],
    contenders: Sequence[str],
    ratios: Sequence[float],
    orders: Sequence[str],
    seeds: int,
    max_rows: int = 0,
    max_epochs: int = 0,
) -> list[Job]:
    """All combinations, data set by data set; ratios of the recipe where none are given; dense tables once."""
    out = []
    for dataset in datasets:
        for order in orders:
            for ratio in ratios or RECIPES[dataset].ratios:
                for contender in contenders:
                    own_ratio = 1.0 if contender == UNCOMPRESSED else ratio
                    trial = Trial(dataset, order, contender, own_ratio, 0.0, 0, max_rows, max_epochs)
                    out.append(Job(trial, seeds))
    return list(dict.fromkeys(out))


def search(job: Job, run: Callable[[Trial], Outcome | str]) -> Iterator[tuple[Trial, Outcome | str]]:
    """The trials of a job, one after the other, each with what came of it.

    The first seed tries three rates, and further ones on the side where the best was an end. Validation decides.
    """
    found: dict[float, float] = {}
    left = list(_FIRST_RATES)
    while left:
        rate = left.pop(0)
        trial = replace(job.trial, rate=rate)
        outcome = run(trial)
        yield trial, outcome
        if isinstance(outcome, str):
            return
        found[rate] = outcome.validation_ne if outcome.validation_ne == outcome.validation_ne else float("inf")
        if not left:
            place = RATES.index(best_rate(found))
            near = (RATES[k] for k in (place - 1, place + 1) if 0 <= k < len(RATES))
            left = [rate for rate in near if rate not in found]
    for seed in range(1, job.seeds):
        trial = replace(job.trial, rate=best_rate(found), seed=seed)
        yield trial, run(trial)


def best_rate(validation_ne: dict[float, float]) -> float:
    """The rate of the lowest validation NE."""
    return min(validation_ne, key=lambda rate: validation_ne[rate])


def read(path: Path) -> Finished:
    """The finished trials of a file; a last line that was cut off is left out."""
    finished: Finished = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                values = json.loads(line)
            except json.JSONDecodeError:
                continue
            outcome = values["outcome"]
            finished[Trial(**values["trial"])] = outcome if isinstance(outcome, str) else Outcome(**outcome)
    return finished


def _append(path: Path, trial: Trial, outcome: Outcome | str) -> None:
    line = json.dumps({"trial": asdict(trial), "outcome": outcome if isinstance(outcome, str) else asdict(outcome)})
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:  # in one write, since workers share the file
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def train_or_say_why(trial: Trial) -> Outcome | str:
    """The outcome of a trial, or the reason why its contender has no tables of so few weights."""
    try:
        return train(trial)
    except DoesNotFitError as reason:
        return f"{reason}"


def _work(job: Job, path: Path, finished: Finished) -> str:
    torch.set_num_threads(1)

    def run(trial: Trial) -> Outcome | str:
        if trial not in finished:
            outcome = train_or_say_why(trial)
            _append(path, trial, outcome)
            return outcome
        return finished[trial]

    outcomes = [outcome for _, outcome in search(job, run)]
    last = outcomes[-1]
    return last if isinstance(last, str) else f"NE {last.test_ne:.4f}, {last.step_ms:.1f} ms a step"


def run_all(todo: Sequence[Job], path: Path, workers: int, say: Callable[[str], None]) -> None:
    """Runs jobs in worker processes of one thread each.

    Args:
        todo: the jobs.
        path: file of finished trials, read and added to.
        workers: processes.
        say: is told of each finished job.

    Raises:
        MissingDataError: before anything runs, if a data set is not installed.
    """
    for name, rows in {(job.trial.dataset, job.trial.max_rows): None for job in todo}:
        load_rows(name, rows)
    load_rows.cache_clear()
    path.parent.mkdir(parents=True, exist_ok=True)
    finished = read(path)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[str], Job] = {pool.submit(_work, job, path, _of(job, finished)): job for job in todo}
        try:
            for number, future in enumerate(as_completed(running), start=1):
                say(f"{number}/{len(todo)} {running[future].name()}: {future.result()}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _of(job: Job, finished: Finished) -> Finished:
    """What is finished of a job."""
    same = replace(job.trial, rate=0.0, seed=0)
    return {trial: outcome for trial, outcome in finished.items() if replace(trial, rate=0.0, seed=0) == same}


def check_names(contenders: Sequence[str]) -> None:
    """Raises ``ValueError`` for an unknown contender."""
    for name in contenders:
        if name not in CONTENDERS:
            raise ValueError(f"unknown contender {name!r}; known: {', '.join(CONTENDERS)}")
