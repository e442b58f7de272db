"""The command line of ``train_dlrm.py``: a YAML file, ``--set``, and options named as in dlrm_main.py.

Later sources win: the file, then ``--set``, then the named options.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from flowtt_torchrec.datasets import Split
from flowtt_torchrec.hints import did_you_mean
from flowtt_torchrec.training.config import TrainConfig
from flowtt_torchrec.training.errors import ConfigError
from flowtt_torchrec.training.settings import Tree, assign, build, merge, read_assignment, read_yaml

RUN_OPTIONS = [
    "--config",
    "--set",
    "--resume",
    "--evaluate",
    "--checkpoint",
    "--print-config",
    "--dry-run",
    "--world-size",
    "--local-world-size",
]
# Option of the command line -> key of the configuration. Flags set it to True, or to the value after "=".
SETTINGS = {
    "--data": "data.path",
    "--num_embeddings": "data.num_embeddings",
    "--num_embeddings_per_feature": "data.num_embeddings_per_feature",
    "--embedding_dim": "model.embedding_dim",
    "--dense_arch_layer_sizes": "model.dense_arch_layer_sizes",
    "--over_arch_layer_sizes": "model.over_arch_layer_sizes",
    "--interaction_type": "model.interaction_type",
    "--dcn_num_layers": "model.dcn_num_layers",
    "--dcn_low_rank_dim": "model.dcn_low_rank_dim",
    "--interaction_branch1_layer_sizes": "model.interaction_branch1_layer_sizes",
    "--interaction_branch2_layer_sizes": "model.interaction_branch2_layer_sizes",
    "--learning_rate": "optimizer.learning_rate",
    "--eps": "optimizer.eps",
    "--lr_warmup_steps": "optimizer.lr_warmup_steps",
    "--lr_decay_start": "optimizer.lr_decay_start",
    "--lr_decay_steps": "optimizer.lr_decay_steps",
    "--epochs": "training.epochs",
    "--batch_size": "training.batch_size",
    "--test_batch_size": "training.test_batch_size",
    "--limit_train_batches": "training.limit_train_batches",
    "--limit_val_batches": "training.limit_val_batches",
    "--validation_freq_within_epoch": "training.validation_freq_within_epoch",
    "--seed": "training.seed",
    "--device": "training.device",
    "--hbm": "planner.hbm",
    "--ddr": "planner.ddr",
    "--plan": "planner.plan",
    "--save-plan": "planner.save_plan",
    "--costs": "planner.costs",
    "--checkpoint-dir": "checkpoint.directory",
    "--report-dir": "report.directory",
}
PLAN_FILES = ("planner.plan", "planner.save_plan", "planner.costs")
PATHS = ("data.path", "checkpoint.directory", "report.directory", *PLAN_FILES)
FLAGS = {
    "--adagrad": "optimizer.kind=adagrad",
    "--drop_last_training_batch": "training.drop_last_training_batch=true",
    "--allow_tf32": "training.allow_tf32=true",
    "--print_sharding_plan": "report.print_sharding_plan=true",
}
# Options of dlrm_main.py that cannot mean anything here, and what to do instead.
ABSENT = {
    "--dataset_name": "the columns are the same for Kaggle and 1TB; give the files with --data",
    "--in_memory_binary_criteo_path": "raw TSV is read as a stream; give it with --data",
    "--synthetic_multi_hot_criteo_path": "raw TSV is read as a stream; give it with --data",
    "--limit_test_batches": "there is one held-out split; use --limit_val_batches",
    "--multi_hot_sizes": "multi-hot data is read or generated with data.kind=meta",
    "--multi_hot_distribution_type": "multi-hot data is read or generated with data.kind=meta",
    "--collect_multi_hot_freqs_stats": "it is not supported",
    "--undersampling_rate": "it is not supported",
    "--pin_memory": "it is not supported",
    "--mmap_mode": "raw TSV is read as a stream, never whole in memory",
    "--shuffle_batches": "use --set data.shuffle_rows=N",
    "--shuffle_training_set": "use --set data.shuffle_rows=N",
    "--print_lr": "the learning rate is in the report and in TensorBoard",
}


@dataclass(frozen=True)
class DryRun:
    """The machine to plan for without training."""

    world_size: int
    local_world_size: int


@dataclass(frozen=True)
class Evaluation:
    """What to score without training.

    Args:
        split: of the data.
        checkpoint: ``best``, ``last`` or a step.
    """

    split: Split
    checkpoint: str


@dataclass(frozen=True)
class Invocation:
    """A command line, read.

    Args:
        config: the settings.
        name: of the run: that of the configuration file.
        resume: continue from the last checkpoint.
        print_config: print the settings and stop.
        dry_run: plan for this machine, print the plan and stop.
        evaluate: score a checkpoint and stop.
    """

    config: TrainConfig
    name: str
    resume: bool = False
    print_config: bool = False
    dry_run: DryRun | None = None
    evaluate: Evaluation | None = None


class _Parser(argparse.ArgumentParser):
    """Wrong options become a `ConfigError`, so that one place decides how errors are shown."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> argparse.ArgumentParser:
    """The command line of ``train_dlrm.py``."""
    result = _Parser(
        prog="train_dlrm.py",
        allow_abbrev=False,
        description="Trains TorchRec's DLRM with tensor-train tables. Settings come from a YAML file, then --set, then "
        "the named options; later ones win. Works alone, and under torchrun and torchx.",
    )
    result.add_argument("--config", metavar="FILE", help="YAML file, see configs/")
    result.add_argument(  # several values, since torchx lets no option occur twice
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="settings, e.g. compression.rank=16 training.seed=3",
    )
    result.add_argument("--resume", action="store_true", help="continue from the last checkpoint, if there is one")
    result.add_argument(
        "--evaluate",
        nargs="?",
        const="val",
        choices=("val", "test"),
        help="score a checkpoint on a split (default val) without training; prepared folders have a test split",
    )
    result.add_argument(
        "--checkpoint", metavar="WHICH", help="for --evaluate: best (the default), last, or the number of a step"
    )
    result.add_argument("--print-config", action="store_true", help="print all settings as YAML and stop")
    dry = result.add_argument_group("planning without training")
    dry.add_argument("--dry-run", action="store_true", help="print the plan and the compression table and stop")
    dry.add_argument("--world-size", type=int, metavar="N", help="ranks to plan for (default 1)")
    dry.add_argument("--local-world-size", type=int, metavar="N", help="ranks of one host (default: up to 8)")
    named = result.add_argument_group("settings by name")
    for option, key in SETTINGS.items():
        named.add_argument(option, metavar="VALUE", help=f"sets {key}")
    for option, assignment in FLAGS.items():
        named.add_argument(option, action="store_true", help=f"sets {assignment}")
    return result


def parse(arguments: Sequence[str]) -> Invocation:
    """Reads a command line.

    Raises:
        ConfigError: an option, key or value is wrong, or the file is missing.
    """
    options, unknown = parser().parse_known_args(arguments)
    if unknown:
        raise ConfigError(_unknown_option(unknown[0]))
    tree: Tree = _read_file(Path(options.config)) if options.config else {}
    for assignment in options.set:
        tree = merge(tree, read_assignment(assignment))
    for option, key in SETTINGS.items():
        text = getattr(options, option.lstrip("-").replace("-", "_"))
        if text is not None:
            # Paths and lists are taken as they stand; everything else has YAML's types.
            value = text if key in PATHS else _value(option, text)
            tree = merge(tree, assign(key.split("."), value, option))
    for option, assignment in FLAGS.items():
        if getattr(options, option.lstrip("-").replace("-", "_")):
            key, _, value = assignment.partition("=")
            tree = merge(tree, assign(key.split("."), yaml.safe_load(value), option))
    config = build(TrainConfig, tree)
    if options.resume and config.checkpoint.directory is None:
        raise ConfigError("--resume: there is no checkpoint directory; set checkpoint.directory or --checkpoint-dir")
    return Invocation(
        config=config,
        name=Path(options.config).stem if options.config else "train_dlrm",
        resume=options.resume,
        print_config=options.print_config,
        dry_run=_dry_run(options),
        evaluate=_evaluation(options, config),
    )


def _read_file(path: Path) -> Tree:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"--config {path}: cannot read it: {reason}") from None
    return read_yaml(text, str(path))


def _value(option: str, text: str) -> object:
    try:
        return text if "," in text else yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{option}: {text!r} is not a valid value") from None


def _evaluation(options: argparse.Namespace, config: TrainConfig) -> Evaluation | None:
    if options.evaluate is None:
        if options.checkpoint is not None:
            raise ConfigError("--checkpoint goes with --evaluate; training continues from the last one with --resume")
        return None
    for name in ("resume", "dry_run"):
        if getattr(options, name):
            raise ConfigError(f"--evaluate does not train or plan only: leave out --{name.replace('_', '-')}")
    if config.checkpoint.directory is None:
        raise ConfigError("--evaluate: there is no checkpoint directory; set checkpoint.directory or --checkpoint-dir")
    which = options.checkpoint or "best"
    if which not in ("best", "last") and not (which.isascii() and which.isdigit()):
        raise ConfigError(f"--checkpoint {which}: must be best, last or the number of a step")
    return Evaluation(options.evaluate, which)


def _dry_run(options: argparse.Namespace) -> DryRun | None:
    if not options.dry_run:
        for name in ("world_size", "local_world_size"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} goes with --dry-run; else torchrun or torchx decide")
        return None
    world_size = 1 if options.world_size is None else options.world_size
    local = min(world_size, 8) if options.local_world_size is None else options.local_world_size
    if world_size < 1 or local < 1 or world_size % local:
        raise ConfigError(f"--world-size {world_size} must be a positive multiple of --local-world-size {local}")
    return DryRun(world_size, local)


def _unknown_option(word: str) -> str:
    option = word.partition("=")[0]
    if option in ABSENT:
        return f"{option} is an option of dlrm_main.py that is not taken here: {ABSENT[option]}"
    hint = did_you_mean(option, [*RUN_OPTIONS, *SETTINGS, *FLAGS])
    return f"unknown option {option!r}{hint or '; --help lists all options'}"
