"""Cost constants: measured, fitted, written and read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flowtt_torchrec import calibration, lookup_costs, step_costs
from flowtt_torchrec.__main__ import main
from flowtt_torchrec.calibration import _fit, calibrate
from flowtt_torchrec.cost_fits import fit, fit_lookup_costs, fit_step_costs
from flowtt_torchrec.planner_costs import DEFAULTS, CostConstants, PassCost, default_costs

WORK = [(1e6, 100.0, 90.0), (4e6, 1000.0, 100.0), (8e6, 300.0, 299.0), (2e5, 3000.0, 10.0), (9e7, 9000.0, 3000.0)]


@pytest.mark.parametrize("cost", [PassCost(2e6, 1e6, 1e-3, 5e-3), PassCost(5e5, 1e6, 0.0, 2e-3), PassCost(1e6, 1e6)])
def test_a_fit_finds_what_made_the_times(cost: PassCost) -> None:
    found = _fit(WORK, [cost.ms(flops, 0, lookups, flows) for flops, lookups, flows in WORK], 1e6)
    assert found.flops_per_ms == pytest.approx(cost.flops_per_ms, rel=1e-3)
    assert found.ms_per_lookup == pytest.approx(cost.ms_per_lookup, rel=1e-3, abs=1e-9)
    assert found.ms_per_flow == pytest.approx(cost.ms_per_flow, rel=1e-3, abs=1e-9)


FORWARD, BACKWARD = PassCost(2e6, 1e6, 1e-3, 5e-3), PassCost(5e5, 1e6, 0.0, 2e-3)


@pytest.fixture
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is done, and takes what `FORWARD` and `BACKWARD` say: times of a busy machine need not grow with the work."""
    measure = calibration._measure

    def with_known_times(*case: Any) -> calibration.Sample:
        flops, lookups, flows = features = measure(*case).features
        return calibration.Sample(features, FORWARD.ms(flops, 0, lookups, flows), BACKWARD.ms(flops, 0, lookups, flows))

    monkeypatch.setattr(calibration, "_measure", with_known_times)


@pytest.mark.usefixtures("idle_machine")
def test_calibration_finds_the_cost_of_each_pass_and_says_where(tmp_path: Path) -> None:
    costs = calibrate("cpu", shapes=((20_000, 16, 4), (100_000, 64, 32)), lookups=(500, 8_000), repeats=1)
    assert costs.device == "cpu"
    assert costs.source.startswith("measured on ")
    cpu_info = Path("/proc/cpuinfo").read_text()
    assert costs.measured["machine"] in cpu_info or "model name" not in cpu_info
    assert {"machine", "date", "versions", "threads", "backend"} <= costs.measured.keys()
    for found, expected in ((costs.forward, FORWARD), (costs.backward, BACKWARD)):
        work = (64e6, 0.0, 8_000.0, 4_000.0)
        assert found.ms(*work) == pytest.approx(expected.ms(*work), rel=1e-2)
    path = tmp_path / "costs.json"
    costs.save(path)
    assert CostConstants.load(path) == costs


def test_a_measurement_has_the_work_of_its_batch_and_times() -> None:
    sample = calibration._measure(torch.device("cpu"), 20_000, 16, 4, 500, 1)
    flops, lookups, flows = sample.features
    assert lookups == 500
    assert 1 <= flows <= 500
    assert flops > 0
    assert 0 < sample.forward_ms < float("inf")
    assert 0 < sample.backward_ms < float("inf")


def test_shipped_constants_say_that_they_are_not_measured() -> None:
    for costs in DEFAULTS.values():
        assert "not measured" in costs.source
        assert not costs.measured
    assert default_costs("cpu").device == "cpu"
    assert default_costs("cuda") == DEFAULTS["a100"]


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', '{"version": 1, "device": "cpu"}'])
def test_a_file_without_constants_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError, match=r"costs\.json has no cost constants .*calibrate"):
        CostConstants.load(tmp_path / "costs.json")


def test_rates_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="rates must be above 0"):
        PassCost(0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_says_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "costs.json"
    monkeypatch.setattr(sys, "argv", ["flowtt_torchrec", "calibrate", "--device", "cuda", "--output", str(output)])
    with pytest.raises(SystemExit):
        main()
    assert "torch finds no GPU" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.usefixtures("idle_machine")
def test_the_command_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "costs.json"
    monkeypatch.setattr(sys, "argv", ["flowtt_torchrec", "calibrate", "--output", str(output)])
    monkeypatch.setattr(calibration, "SHAPES", ((20_000, 16, 4), (100_000, 64, 32)))
    monkeypatch.setattr(calibration, "LOOKUPS", (500, 8_000))
    main()
    assert json.loads(output.read_text())["device"] == "cpu"
    assert CostConstants.load(output).source in capsys.readouterr().out


def test_a_fit_leaves_out_what_costs_nothing_and_keeps_what_must() -> None:
    amounts = [{"a": float(a), "b": float(b), "c": 1.0} for a in (1, 2, 5) for b in (1, 3, 4)]
    found = fit(amounts, [3 * sample["a"] + 7 - 0.01 * sample["b"] for sample in amounts])
    assert found.constants == pytest.approx({"a": 3.0, "b": 0.0, "c": 7.0}, rel=0.02)
    assert 0.98 < found.p10 <= found.median <= found.p90 < 1.02
    with pytest.raises(RuntimeError, match="do not grow with the work"):
        fit(amounts, [100 - sample["a"] for sample in amounts], always=("a",))


def test_the_models_of_the_source_are_fitted_to_times_of_their_own_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lookup = fit_lookup_costs(shapes=((1_000, 16, 4), (100_000, 32, 8)), lookups=(500,), repeats=1)
    assert lookup.constants.keys() == lookup_costs.MEASURED._asdict().keys()
    assert lookup.samples == 2 * 3 * 4
    step = fit_step_costs(shapes=5, lookups=500, repeats=1)
    assert step.constants.keys() == step_costs.MEASURED._asdict().keys()
    assert step.samples == 5 * 3

    output = tmp_path / "step.json"
    monkeypatch.setattr(calibration, "fit_step_costs", lambda: step)
    monkeypatch.setattr(sys, "argv", ["flowtt_torchrec", "calibrate", "--model", "step", "--output", str(output)])
    main()
    assert json.loads(output.read_text())["constants"] == step.constants
    assert "step_costs.py" in capsys.readouterr().out
