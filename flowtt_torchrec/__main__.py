"""``python -m flowtt_torchrec env | calibrate | compress | export | prepare | verify``: what is installed; what lookups
cost; checkpoints to tensor trains and back; click data made ready to be read."""

from __future__ import annotations

import argparse
import functools
import json
import platform
from pathlib import Path

import torch

from flowtt_torchrec.calibration import calibrate, refit
from flowtt_torchrec.files import write_atomically
from flowtt_torchrec.machine import cpu_model
from flowtt_torchrec.ops import backend_info
from flowtt_torchrec.precision import compute_dtype
from flowtt_torchrec.shapes import OBJECTIVES
from flowtt_torchrec.spec import TTSpec, compress_to_fit
from flowtt_torchrec.versions import versions


def environment() -> dict[str, str]:
    """What a bug report needs, by name."""
    backend = backend_info()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        **{name: version or "not installed" for name, version in versions().items()},
        "cuda": torch.version.cuda or "none (CPU build of torch)",
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "cuda devices": ", ".join(devices) or "none",
        "backend": f"{backend.name} ({backend.reason})",
        "compiled library": backend.error or str(backend.library),
    }


def _print_environment(options: argparse.Namespace) -> None:
    _show(environment())


def _show(values: dict[str, str]) -> None:
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}}  {value}")


def _calibrate(options: argparse.Namespace) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.model != "planner":
        fitted = refit(options.model)
        write_atomically(options.output, json.dumps(fitted, indent=1) + "\n")
        quality = "predicted over measured: {p10:.2f} (10 %), {median:.2f} (median), {p90:.2f} (90 %)".format(**fitted)
        _show({name: f"{value:.4g} ns" for name, value in fitted["constants"].items()} | {"fit": quality})
        _say(f"written to {options.output}; they are the defaults of Constants in {options.model}_costs.py")
        return
    costs = calibrate(options.device)
    costs.save(options.output)
    _show({"costs": costs.source, "forward": str(costs.forward), "backward": str(costs.backward)})
    _say(f"written to {options.output}")


def _compress(options: argparse.Namespace) -> None:
    from flowtt_torchrec.distributed.checkpoint import conversion  # needs torchrec, which `env` does not

    conversion.compress_checkpoint(options.source, options.target, _specs(options), say=_say)


def _specs(options: argparse.Namespace) -> dict[str, TTSpec]:
    """The specs that the options name, or make for tables of the checkpoint."""
    from flowtt_torchrec.distributed.checkpoint.conversion import saved_dense_tables

    if options.specs is not None:
        return {name: TTSpec.from_dict(spec) for name, spec in json.loads(options.specs.read_text()).items()}
    tables = saved_dense_tables(options.source)
    suggest = {"rank": options.rank, "num_cores": options.num_cores, "objective": options.objective}
    if options.budget is not None:
        return compress_to_fit(
            tables,
            options.budget,
            element_size=max((table.dtype.itemsize for table in tables), default=4),
            core_element_size=max((compute_dtype(table.dtype).itemsize for table in tables), default=4),
            **suggest,
        )
    unknown = sorted(set(options.tables) - {table.name for table in tables})
    if unknown:
        raise ValueError(f"{options.source} has no dense table {', '.join(unknown)}")
    return {
        t.name: TTSpec.suggest(t.num_embeddings, t.embedding_dim, **suggest) for t in tables if t.name in options.tables
    }


def _export(options: argparse.Namespace) -> None:
    from flowtt_torchrec.distributed.checkpoint import conversion

    conversion.export_checkpoint(options.source, options.target, say=_say)


def _prepare(options: argparse.Namespace) -> None:
    from flowtt_torchrec.datasets.prepared import prepare, source_files

    columns = source_files.CRITEO
    if options.sparse is not None:
        columns = source_files.Columns(options.label, options.dense or [], options.sparse, not options.text_ids)
    elif options.label is not None or options.dense is not None or options.text_ids:
        raise ValueError("--label, --dense and --text-ids go with --sparse, which names the columns of ids")
    sizes = options.num_embeddings
    prepare.prepare(
        options.source,
        options.target,
        columns=columns,
        ids=options.ids,
        num_embeddings=sizes[0] if sizes is not None and len(sizes) == 1 else sizes,
        frequency_threshold=options.frequency_threshold,
        like=options.like,
        split=options.split,
        skip_bad_rows=options.on_bad_row == "skip",
        max_bad_share=options.max_bad_share,
        workers=options.workers,
        say=_say,
    )


def _verify(options: argparse.Namespace) -> None:
    from flowtt_torchrec.datasets.prepared.prepare import verify

    verify(options.folder, _say)


def _whole_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


_say = functools.partial(print, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flowtt_torchrec")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    env = commands.add_parser("env", help="print what is installed, and which backend runs the ops and why")
    env.set_defaults(run=_print_environment)
    measure = commands.add_parser("calibrate", help="measure what lookups cost here, for the planner (planner.costs)")
    measure.add_argument(
        "--model",
        choices=["planner", "lookup", "step"],
        default="planner",
        help="whose constants (%(default)s); lookup and step, which choose strategies and shapes, are in the source",
    )
    measure.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    measure.add_argument("--output", type=Path, default="flowtt_costs.json", metavar="FILE", help="JSON (%(default)s)")
    measure.add_argument("--threads", type=int, metavar="N", help="CPU threads of a rank (default: all)")
    measure.set_defaults(run=_calibrate)

    files = argparse.ArgumentParser(add_help=False)
    files.add_argument("source", type=Path, help="a DCP directory, or a file of torch.save")
    files.add_argument("target", type=Path, help="where to write: a file if it ends in .pt, .pth or .bin, else DCP")
    compress = commands.add_parser("compress", parents=[files], help="make tensor trains of dense tables (TT-SVD)")
    which = compress.add_mutually_exclusive_group(required=True)
    which.add_argument("--tables", nargs="+", metavar="NAME", help="the tables to compress")
    which.add_argument("--budget", metavar="SIZE", help="compress the largest until all tables fit, like 8GB")
    which.add_argument("--specs", type=Path, metavar="FILE", help="JSON: table name to TTSpec.to_dict()")
    compress.add_argument("--rank", type=int, default=32)
    compress.add_argument("--num-cores", type=int, choices=(2, 3, 4))
    compress.add_argument("--objective", choices=OBJECTIVES, default="balanced")
    compress.set_defaults(run=_compress)
    export = commands.add_parser("export", parents=[files], help="make dense tables of all tensor trains")
    export.set_defaults(run=_export)
    _add_prepare(commands)
    return parser


def _add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    prepare = commands.add_parser("prepare", help="make click data ready: text, CSV or Parquet to npy files, once")
    prepare.add_argument("source", type=Path, help="raw Criteo text (.gz, .zst), CSV or Parquet: a file or a folder")
    prepare.add_argument("target", type=Path, help="the folder to write; a run that was stopped goes on there")
    prepare.add_argument(
        "--ids", choices=["modulo", "hash", "contiguous"], default="modulo", help="how ids become rows (%(default)s)"
    )
    prepare.add_argument(
        "--num-embeddings", type=_whole_numbers, metavar="N[,N...]", help="rows of all tables, or of each"
    )
    prepare.add_argument(
        "--frequency-threshold", type=int, default=1, metavar="N", help="contiguous: rarer ids share row 0"
    )
    prepare.add_argument("--like", type=Path, metavar="FOLDER", help="take the rule of ids of a prepared folder")
    prepare.add_argument("--split", choices=["auto", "time", "last_part", "none"], default="auto")
    prepare.add_argument("--label", metavar="NAME", help="CSV, Parquet: column of zeros and ones; none if left out")
    prepare.add_argument("--dense", type=_names, metavar="NAME[,NAME...]", help="CSV, Parquet: columns of numbers")
    prepare.add_argument("--sparse", type=_names, metavar="NAME[,NAME...]", help="CSV, Parquet: columns of ids")
    prepare.add_argument("--text-ids", action="store_true", help="ids are any text, not hexadecimal numbers")
    prepare.add_argument("--on-bad-row", choices=["stop", "skip"], default="stop")
    prepare.add_argument(
        "--max-bad-share", type=float, default=0.001, metavar="SHARE", help="of skipped rows (%(default)s)"
    )
    prepare.add_argument("--workers", type=int, metavar="N", help="threads (default: one a CPU)")
    prepare.set_defaults(run=_prepare)
    check = commands.add_parser("verify", help="check a prepared folder against its checksums")
    check.add_argument("folder", type=Path)
    check.set_defaults(run=_verify)


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    try:
        options.run(options)
    except ValueError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
