"""Lookups and training steps of tensor-train tables, against the alternatives: ``python -m benchmarks.lookup``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import environment
from benchmarks.presets import PRESETS, Preset
from benchmarks.questions import DEVICE_QUESTIONS, QUESTIONS
from benchmarks.questions.run import Run
from benchmarks.report import Report


def run(preset: Preset, questions: Sequence[str], threads: int, command: Sequence[str], device: str = "cpu") -> Report:
    """Answers the questions in turn.

    Args:
        preset: how large.
        questions: names of `QUESTIONS` or `DEVICE_QUESTIONS`.
        threads: torch's threads.
        command: the command line, for the record.
        device: ``"cpu"`` or ``"cuda"``.

    Returns:
        The results.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    described = environment.describe(command)
    described["flowtt"] = environment.describe_backend()
    if device == "cuda":
        described["gpu"] = {
            "name": torch.cuda.get_device_name(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "memory_bytes": torch.cuda.mem_get_info()[1],
            "cuda": torch.version.cuda,
        }
    report = Report("lookup", preset.name, described)
    report.show_environment()
    if described["flowtt"]["name"] != "native":
        report.note("the reference backend runs: these are not the times of the compiled ops")
    for question in questions:
        {**QUESTIONS, **DEVICE_QUESTIONS}[question](Run(preset, report, threads, device))
    report.show_figures()
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lookup", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="quick", help="how large a run is (default: quick)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: as torch chooses")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results there")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write results there")
    names = [*QUESTIONS, *DEVICE_QUESTIONS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"questions: {', '.join(names)}")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help=f"cuda answers: {', '.join(DEVICE_QUESTIONS)}"
    )
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error(f"--threads must be at least 1, not {options.threads}")
    preset = PRESETS[options.preset]
    questions = options.only or preset.questions
    if options.device == "cuda":
        if not torch.cuda.is_available():
            parser.error(f"--device cuda: torch {torch.__version__} sees no GPU here")
        questions = options.only or list(DEVICE_QUESTIONS)
        if others := sorted(set(questions) - set(DEVICE_QUESTIONS)):
            parser.error(f"--device cuda answers {', '.join(DEVICE_QUESTIONS)} only, not {', '.join(others)}")
    report = run(preset, questions, options.threads, environment.command_line(), options.device)
    for path, write in ((options.json, report.write_json), (options.csv, report.write_csv)):
        if path is not None:
            write(path)
            report.progress(f"wrote {path}")


if __name__ == "__main__":
    main()
