from __future__ import annotations

from pathlib import Path

import pytest
from training_jobs import ROOT

from flowtt_torchrec.training.config import TrainConfig
from flowtt_torchrec.training.errors import ConfigError
from flowtt_torchrec.training.options import ABSENT, FLAGS, SETTINGS, DryRun, parse
from flowtt_torchrec.training.settings import build, read_yaml, to_yaml

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def test_file_then_set_then_named_options(tiny: Path) -> None:
    config = ["--config", str(tiny)]
    assert parse(config).config.training.batch_size == 25
    assignment = ["--set", "training.batch_size=26"]
    assert parse([*config, *assignment]).config.training.batch_size == 26
    assert parse(["--batch_size", "27", *config, *assignment]).config.training.batch_size == 27
    assert parse([*config, *assignment, "--set", "training.batch_size=28"]).config.training.batch_size == 28
    several = parse([*config, "--set", "training.batch_size=29", "training.seed=5", "--print-config"])
    assert (several.config.training.batch_size, several.config.training.seed) == (29, 5)
    assert several.print_config


def test_options_of_dlrm_main() -> None:
    options = (
        "--data /d --epochs 2 --batch_size 3 --test_batch_size 4 --limit_train_batches 5 --limit_val_batches 6 "
        "--num_embeddings_per_feature 7,8 --embedding_dim 16 --dense_arch_layer_sizes 32,16 --adagrad "
        "--over_arch_layer_sizes 8,1 --learning_rate 0.5 --eps 1e-6 --seed 9 --drop_last_training_batch "
        "--interaction_type dcn --dcn_num_layers 2 --dcn_low_rank_dim 8 --validation_freq_within_epoch 10 "
        "--lr_warmup_steps 1 --lr_decay_start 2 --lr_decay_steps 3 --print_sharding_plan --allow_tf32"
    )
    config = parse(options.split()).config
    assert (config.data.path, config.data.num_embeddings_per_feature) == ("/d", [7, 8])
    assert (config.model.embedding_dim, config.model.dense_arch_layer_sizes) == (16, [32, 16])
    assert (config.model.over_arch_layer_sizes, config.model.interaction_type) == ([8, 1], "dcn")
    assert (config.model.dcn_num_layers, config.model.dcn_low_rank_dim) == (2, 8)
    assert (config.optimizer.kind, config.optimizer.learning_rate, config.optimizer.eps) == ("adagrad", 0.5, 1e-6)
    assert (config.optimizer.lr_warmup_steps, config.optimizer.lr_decay_start) == (1, 2)
    assert config.optimizer.lr_decay_steps == 3
    training = config.training
    assert (training.epochs, training.batch_size, training.test_batch_size, training.seed) == (2, 3, 4, 9)
    assert (training.limit_train_batches, training.limit_val_batches) == (5, 6)
    assert training.drop_last_training_batch
    assert training.validation_freq_within_epoch == 10
    assert training.allow_tf32
    assert config.report.print_sharding_plan


def test_every_named_option_names_a_key() -> None:
    known = build(TrainConfig, read_yaml("data: {path: x}", "f"))
    for key in [*SETTINGS.values(), *(assignment.partition("=")[0] for assignment in FLAGS.values())]:
        section, _, field = key.partition(".")
        assert hasattr(getattr(known, section), field), key


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--epoch 3", "unknown option '--epoch'; did you mean '--epochs'?"),
        ("--batch-size=3", "unknown option '--batch-size'; did you mean '--batch_size'?"),
        ("--epochs many", "--epochs: training.epochs must be a whole number, not 'many'"),
        ("--epochs 0", "--epochs: training.epochs: must be at least 1, not 0"),
        ("--learning_rate -1", "--learning_rate: optimizer.learning_rate: must be above 0, not -1.0"),
        ("--set training.epoch=3", "--set training.epoch=3: unknown key 'epoch' in training; did you mean 'epochs'?"),
        ("--set optimzer.eps=3", "unknown key 'optimzer'; did you mean 'optimizer'?"),
        ("--set compression.budget=8XB", "compression.budget: cannot read '8XB' as a size"),
        ("--set compression.num_cores=5", "compression.num_cores: must be 2 to 4, not 5"),
        ("--set compression.objective=balance", "'balance' is unknown; known: .*did you mean 'balanced'?"),
        ("--set compression.tables.t_cat_0.p=[4,4]", r"compression.tables.t_cat_0.p: give both p and q, or neither"),
        ("--set data.val_every=1", "data.val_every: must be at least 2, not 1"),
        ("--embedding_dim 32", "must end with the embedding_dim, 32"),
        (
            "--interaction_type projection --interaction_branch2_layer_sizes 8,7",
            "must end with a multiple of the embedding_dim, 8",
        ),
        ("--interaction_type dcn --dcn_num_layers 0", "dcn_num_layers: must be at least 1, not 0"),
        ("--over_arch_layer_sizes 8,2", "needs two or more layers, the last of size 1"),
        ("--world-size 8", "--world-size goes with --dry-run"),
        ("--dry-run --world-size 12", "--world-size 12 must be a positive multiple of --local-world-size 8"),
        ("--resume", "--resume: there is no checkpoint directory"),
        ("--epochs", "argument --epochs: expected one argument"),
        ("--config missing.yaml", "--config missing.yaml: cannot read it: No such file or directory"),
        ("more", "unknown option 'more'; --help lists all options"),
    ],
)
def test_wrong_options_are_told(tiny: Path, arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["--config", str(tiny), *arguments.split()])


@pytest.mark.parametrize("dim", [3, 10, 24, 48, 96, 100, 128])
def test_any_embedding_dim_goes_with_the_defaults(dim: int) -> None:
    for interaction in ("original", "dcn", "projection"):
        options = ["--data", "x", "--embedding_dim", str(dim), "--interaction_type", interaction]
        model = parse(options).config.model
        assert model.dense_arch_layer_sizes == [512, 256, dim]
        assert model.interaction_branch1_layer_sizes is not None
        assert 0 <= model.interaction_branch1_layer_sizes[-1] - 2048 < dim
        assert model.interaction_branch1_layer_sizes[-1] % dim == 0


def test_settings_are_checked_only_where_they_are_used() -> None:
    parse(["--data", "x", "--interaction_branch1_layer_sizes", "7", "--dcn_num_layers", "0"])


@pytest.mark.parametrize("option", ABSENT)
def test_options_without_a_meaning_are_refused_not_ignored(tiny: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is an option of dlrm_main.py that is not taken here: "):
        parse(["--config", str(tiny), option])


def test_typo_in_the_file_has_file_and_line(tiny: Path) -> None:
    tiny.write_text(tiny.read_text() + "checkpoint:\n  keeep: 3\n")
    line = len(tiny.read_text().splitlines())
    with pytest.raises(ConfigError, match=f"tiny.yaml:{line}: unknown key 'keeep' in checkpoint; did you mean 'keep'?"):
        parse(["--config", str(tiny)])


def test_data_is_required() -> None:
    with pytest.raises(ConfigError, match=r"data.path: not set: give --data PATH, or a data.generate section"):
        parse([])


def test_dry_run_defaults_to_hosts_of_eight() -> None:
    assert parse(["--data", "x", "--dry-run"]).dry_run == DryRun(1, 1)
    assert parse(["--data", "x", "--dry-run", "--world-size", "16"]).dry_run == DryRun(16, 8)


def test_printed_config_reads_back_equal(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from flowtt_torchrec.training.cli import main

    arguments = ["--set", "compression.tables={t_cat_0: dense, t_cat_2: {rank: 3}}", "--hbm", "80GB"]
    assert main(["--config", str(tiny), *arguments, "--print-config"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    config = parse(["--config", str(printed)]).config
    assert config == parse(["--config", str(tiny), *arguments]).config
    assert to_yaml(config) == printed.read_text()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_our_own_configs_are_right(path: Path) -> None:
    invocation = parse(["--config", str(path), "--data", "somewhere"])
    assert invocation.name == path.stem
    assert path.read_text().startswith("# "), "a comment says what the run is, how to start it and what to expect"
