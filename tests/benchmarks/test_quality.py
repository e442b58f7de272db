"""Splits, numbering, search, resuming and summary of the quality benchmark, on tiny data."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.quality import data, runs
from benchmarks.quality.__main__ import main
from benchmarks.quality.runs import Job, jobs, read, search
from benchmarks.quality.summary import mean_and_interval, summarise
from benchmarks.quality.training import Outcome, Trial, train


def tiny(max_rows: int = 0) -> data.Rows:
    """Labels that hang on the first column's id, and on nothing else."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.zipf(1.5, 2000) % 100, rng.integers(50, size=2000), rng.integers(3, size=2000)], axis=1)
    labels = (rng.random(2000) < 0.1 + 0.8 * (ids[:, 0] % 2)).astype(np.float32)
    return data.Rows(ids, rng.normal(size=(2000, 1)).astype(np.float32), labels, (100, 50, 3), (0, 1))


@pytest.fixture
def tiny_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(data.RECIPES, "tiny", data.Recipe(tiny, 8, 64, 3, False, (4,)))
    data.load.cache_clear()
    data.load_rows.cache_clear()


@pytest.mark.parametrize("order", data.ORDERS)
def test_a_split_keeps_rows_whole_and_numbers_ids_without_time(order: str) -> None:
    rows = tiny()
    split = data.split(rows, order, seed=0)
    parts = split.train, split.validation, split.test
    assert [len(part.labels) for part in parts] == [1600, 200, 200]
    for column, size in enumerate(rows.sizes):
        counts = torch.bincount(split.train.ids[:, column], minlength=size)
        assert torch.equal(counts, split.counts[column])
        if size > 3:
            assert torch.equal(counts, counts.sort(descending=True).values) == (order == "frequency")
    # An id keeps its rows: the dense feature tells which row it was.
    place = {float(x): row for row, x in enumerate(rows.dense[:, 0])}
    renamed: dict[int, int] = {}
    for ids, dense in zip(split.test.ids[:, 0].tolist(), split.test.dense[:, 0].tolist()):
        assert renamed.setdefault(ids, int(rows.ids[place[dense], 0])) == rows.ids[place[dense], 0]
    mean = float(split.train.labels.mean())
    for id in int(split.counts[0].argmax()), int(split.counts[0].argmin()):
        clicks = split.train.labels[split.train.ids[:, 0] == id]
        expected = (float(clicks.sum()) + 10 * mean) / (len(clicks) + 10) if len(clicks) >= 10 else mean
        assert split.label_rates[0][id] == pytest.approx(expected, rel=1e-5)


def test_a_training_learns_and_repeats(tiny_data: None) -> None:
    trial = Trial("tiny", "random", "tt2", 2, 0.1, 1)
    outcome = train(trial)
    assert outcome.test_ne < 0.9
    assert outcome.test_auc > 0.7
    assert outcome.weights <= outcome.dense_weights / 2
    assert replace(train(trial), step_ms=0) == replace(outcome, step_ms=0)


def outcome(ne: float) -> Outcome:
    return Outcome(1, ne, 1 - ne / 2, ne + 0.01, None, 10, 100, 1.0)


def test_the_search_goes_on_at_an_end_and_other_seeds_take_the_best_rate() -> None:
    job = Job(Trial("tiny", "random", "hash", 4, 0.0, 0), seeds=3)
    made = [trial for trial, _ in search(job, lambda trial: outcome(abs(math.log10(trial.rate)) / 10 + 0.5))]
    rates_and_seeds = [(trial.rate, trial.seed) for trial in made]
    assert rates_and_seeds == [(0.03, 0), (0.1, 0), (0.3, 0), (1.0, 0), (1.0, 1), (1.0, 2)]
    assert [trial.rate for trial, _ in search(job, lambda _: "does not fit")] == [0.03]
    diverged = [t.rate for t, _ in search(job, lambda t: outcome(math.nan if t.rate > 0.03 else 0.8))]
    assert diverged == [0.03, 0.1, 0.3, 0.01, 0.03, 0.03]


def test_dense_tables_are_trained_once_and_only_they_uncompressed() -> None:
    todo = jobs(["movielens"], ["dense", "hash"], [8, 30], ["random"], seeds=2)
    made = [(job.trial.contender, job.trial.ratio) for job in todo]
    assert made == [("dense", 1.0), ("hash", 8), ("hash", 30)]


def test_finished_trials_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Trial] = []

    def fake(trial: Trial) -> Outcome:
        made.append(trial)
        return outcome(0.5 + trial.rate)

    monkeypatch.setattr(runs, "train", fake)
    path = tmp_path / "runs.jsonl"
    job = Job(Trial("tiny", "random", "hash", 4, 0.0, 0), seeds=2)
    runs._work(job, path, {})
    assert len(made) == len(read(path)) == 7  # 0.03, 0.1, 0.3, 0.01, 0.003, 0.001, and a second seed
    with path.open("a") as file:
        file.write('{"trial": {"datas')  # the machine went down here
    again = read(path)
    assert again.keys() == set(made)
    runs._work(replace(job, seeds=3), path, again)
    assert len(made) == 8


def test_differences_are_between_equal_seeds() -> None:
    finished: runs.Finished = {}
    for seed, ne in enumerate((0.7, 0.8, 0.9)):
        for contender, ratio, gain in (("tt2", 4.0, 0.1), ("hash", 4.0, 0.0), ("dense", 1.0, 0.2)):
            for rate in (0.01, 0.1):
                finished[Trial("tiny", "random", contender, ratio, rate, seed)] = outcome(ne - gain + rate)
    finished[Trial("tiny", "random", "narrow", 4.0, 0.01, 0)] = "needs more weights"
    rows = {row.contender: row for row in summarise(finished)}
    assert rows["tt2"].rate == 0.01
    assert rows["tt2"].bytes == 40
    assert rows["tt2"].ne == pytest.approx(0.72)
    assert rows["tt2"].ne_interval == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert (rows["tt2"].ne_less_hash, rows["tt2"].ne_less_dense) == (pytest.approx(-0.1), pytest.approx(0.1))
    assert rows["tt2"].ne_less_hash_interval == pytest.approx(0, abs=1e-9)
    assert rows["narrow"].why_not == "needs more weights"
    assert mean_and_interval([1.0])[0] == 1.0


def test_the_report_of_finished_runs_is_made_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = Trial("movielens", "frequency", "tt2", 8.0, 0.03, 0)
    runs._append(tmp_path / "runs.jsonl", trial, outcome(0.7))
    runs._append(tmp_path / "runs.jsonl", replace(trial, contender="hash"), outcome(0.8))
    main(["--report-only", "--out", str(tmp_path)])
    lines = [line for line in (tmp_path / "quality.csv").read_text().splitlines() if not line.startswith("#")]
    assert lines[0].startswith("dataset,order,ratio,contender")
    assert [line.split(",")[3] for line in lines[1:]] == ["tt2", "hash"]
    printed = capsys.readouterr().out
    assert "-0.1000" in printed
    drawn = {path.name for path in tmp_path.glob("*.png")}
    if importlib.util.find_spec("matplotlib") is None:
        assert "pip install matplotlib" in printed
    else:
        assert drawn == {"bytes_against_ne.png", "step_time_against_ne.png"}


def test_packages_that_are_not_installed_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(data.MissingDataError, match=r"recbole.*requirements/quality\.txt"):
        data.movielens(0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows", "positive"), [("movielens", 72_855, 0.760), ("flights", 327_346, 0.237)])
def test_real_data_is_read_from_installed_packages(name: str, rows: int, positive: float) -> None:
    try:
        read = data.RECIPES[name].load(0)
    except data.MissingDataError as missing:
        pytest.skip(str(missing))
    assert len(read.labels) == rows
    assert read.labels.mean() == pytest.approx(positive, abs=0.001)
    assert tuple(read.ids.max(axis=0) + 1) == read.sizes


def test_planted_rows_know_the_best_score() -> None:
    rows = data.planted_groups(3000)
    split = data.split(rows, "random", 0)
    assert split.best_ne is not None
    assert 0.5 < split.best_ne < 0.9
    assert all(rows.sizes[column] >= 2000 for column in rows.compressed)
    assert len(rows.compressed) >= 4
