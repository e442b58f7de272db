"""The settings of a training run, section by section. `flowtt_torchrec.training.options` reads them from the user.

Every key has the meaning of the option of the same name in ``torchrec_dlrm/dlrm_main.py`` (facebookresearch/dlrm) where
there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flowtt_torchrec.hints import did_you_mean
from flowtt_torchrec.spec import MAX_CORES, MIN_CORES, OBJECTIVES, parse_bytes
from flowtt_torchrec.training.settings import InvalidField

DataTypeName = Literal["FP32", "FP16", "BF16"]
"""TorchRec's ``DataType`` of a table. Tables of 16 bits are not placed data-parallel, where they would be stepped with
state of 16 bits too, and rounded to nearest."""


@dataclass
class GenerateConfig:
    """Rows to generate when ``data.path`` is not set."""

    train_rows: int = 1_000_000
    val_rows: int = 100_000
    scale: float = 1.0
    """Criteo: factor on the number of rows of Kaggle's tables."""
    max_rows: int | None = None
    """Criteo: the most rows a table may have."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "train_rows", "val_rows", "max_rows")
        _positive(self, "scale")


@dataclass
class DataConfig:
    """What to train on: files (``path``), or generated rows (``generate``)."""

    kind: Literal["criteo", "meta"] = "criteo"
    """Criteo click logs (raw TSV), or the synthetic sets of facebookresearch/dlrm_datasets."""
    path: str | None = None
    """A file, or a folder of text files, or one that ``python -m flowtt_torchrec prepare`` has written."""
    val_path: str | None = None
    """Criteo: a file or folder to evaluate on. Without it every ``val_every``-th row is held out."""
    val_every: int = 10
    val_fraction: float = 0.1
    """Meta: the last samples of each file that are held out."""
    shuffle_rows: int = 0
    """Criteo: size of the buffer that rows are shuffled in; 0 keeps the order of the files."""
    shuffle: bool = True
    """Prepared folders: a new order of the training rows each epoch."""
    num_embeddings: int | None = None
    """Criteo files: rows of every table; categories are hashed to them."""
    num_embeddings_per_feature: list[int] | None = None
    """Rows of each table; overrides ``num_embeddings``."""
    num_tables: int | None = None
    """Meta: use the first tables only."""
    seed: int = 0
    generate: GenerateConfig | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_embeddings", "num_tables")
        _at_least(self, 2, "val_every")
        if not 0 < self.val_fraction < 1:
            raise InvalidField("val_fraction", f"must be between 0 and 1, not {self.val_fraction}")
        _at_least(self, 0, "shuffle_rows")
        if self.num_embeddings_per_feature is not None and min(self.num_embeddings_per_feature, default=0) < 1:
            raise InvalidField("num_embeddings_per_feature", "every table needs at least one row")
        if self.path is None and self.generate is None:
            raise InvalidField("path", "not set: give --data PATH, or a data.generate section")


@dataclass
class ModelConfig:
    """TorchRec's DLRM."""

    embedding_dim: int = 64
    """Of all tables. Dense ones are data-parallel if it is no multiple of 4, which FBGEMM's fused kernels need."""
    data_type: DataTypeName = "FP32"
    """Of all tables but those that ``compression`` gives another. FBGEMM has no dense tables in BF16 on a CPU."""
    dense_arch_layer_sizes: list[int] | None = None
    """By default 512, 256 and the ``embedding_dim``, with which it must end."""
    over_arch_layer_sizes: list[int] = field(default_factory=lambda: [512, 512, 256, 1])
    interaction_type: Literal["original", "dcn", "projection"] = "original"
    dcn_num_layers: int = 3
    dcn_low_rank_dim: int = 512
    interaction_branch1_layer_sizes: list[int] | None = None
    """Of the projection; by default 2048 and the next multiple of the ``embedding_dim``, which the last must be."""
    interaction_branch2_layer_sizes: list[int] | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "embedding_dim")
        if self.dense_arch_layer_sizes is None:
            self.dense_arch_layer_sizes = [512, 256, self.embedding_dim]
        if self.dense_arch_layer_sizes[-1:] != [self.embedding_dim]:
            raise InvalidField(
                "dense_arch_layer_sizes",
                f"{self.dense_arch_layer_sizes} must end with the embedding_dim, {self.embedding_dim}",
            )
        if len(self.over_arch_layer_sizes) < 2 or self.over_arch_layer_sizes[-1] != 1:
            raise InvalidField(
                "over_arch_layer_sizes", f"{self.over_arch_layer_sizes} needs two or more layers, the last of size 1"
            )
        # What an interaction needs is checked for this one only.
        if self.interaction_type == "dcn":
            _at_least(self, 1, "dcn_num_layers", "dcn_low_rank_dim")
        for branch in ("interaction_branch1_layer_sizes", "interaction_branch2_layer_sizes"):
            sizes = getattr(self, branch)
            if sizes is None:
                setattr(self, branch, [2048, -(-2048 // self.embedding_dim) * self.embedding_dim])
            elif self.interaction_type != "projection":
                continue
            elif not sizes or sizes[-1] % self.embedding_dim:
                raise InvalidField(branch, f"must end with a multiple of the embedding_dim, {self.embedding_dim}")


@dataclass
class TableCompression:
    """How one table is compressed; what is not given here comes from the ``compression`` section."""

    p: list[int] | None = None
    q: list[int] | None = None
    ranks: list[int] | None = None
    rank: int | None = None
    num_cores: int | None = None
    objective: str | None = None
    data_type: DataTypeName | None = None

    def __post_init__(self) -> None:
        _check_shape_choice(self)
        if (self.p is None) != (self.q is None):
            raise InvalidField("p" if self.q is None else "q", "give both p and q, or neither")
        if self.p is not None and (self.num_cores is not None or self.objective is not None):
            raise InvalidField("p", "p and q are the shape: num_cores and objective cannot be given beside them")
        if self.rank is not None and self.ranks is not None:
            raise InvalidField("rank", "give rank (the same everywhere, clipped to fit) or ranks (exact), not both")


@dataclass
class CompressionConfig:
    """Which tables become tensor trains, and of which shape.

    Tables of at least ``min_rows`` rows do, or, with a ``budget``, as many of the largest as it takes to fit.
    """

    min_rows: int = 100_000
    budget: int | str | None = None
    """Bytes for the weights of all tables, like ``8GB``."""
    rank: int = 32
    num_cores: int | None = None
    objective: str = "balanced"
    data_type: DataTypeName | None = None
    """Of the cores; by default ``model.data_type``."""
    tables: Literal["all", "dense", "auto"] | dict[str, Literal["tt", "dense"] | TableCompression] = field(
        default_factory=dict
    )
    """``all`` or ``dense`` for all tables; ``auto`` to have the planner compress those that would not fit dense; or, by
    table name, ``tt``, ``dense`` or a shape."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "min_rows")
        _check_shape_choice(self)
        _check_size(self, "budget")
        if self.tables == "auto" and self.budget is not None:
            raise InvalidField(
                "budget",
                "has no meaning with tables=auto, which fits the tables into the memory of the devices; leave it out, "
                "or set planner.hbm or planner.ddr",
            )
        if self.tables == "auto" and self.data_type is not None:
            raise InvalidField(
                "data_type",
                "cannot be chosen with tables=auto, where it is not known which tables are tensor trains; set "
                "model.data_type for all tables",
            )


@dataclass
class OptimizerConfig:
    """Of the tables (fused in their backward) and of the dense layers, and the learning rate over time."""

    kind: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = "sgd"
    """On a CPU, where FBGEMM has no Adam, dense tables are data-parallel with ``adam``."""
    dense_kind: Literal["sgd", "adagrad", "adam"] | None = None
    """Of the dense layers and data-parallel tables; by default that of the tables, Adagrad for row-wise Adagrad."""
    learning_rate: float = 15.0
    dense_learning_rate: float | None = None
    """By default ``learning_rate``."""
    eps: float = 1e-8
    lr_warmup_steps: int = 0
    lr_decay_start: int = 0
    lr_decay_steps: int = 0

    def __post_init__(self) -> None:
        _positive(self, "learning_rate", "dense_learning_rate")
        _at_least(self, 0, "eps", "lr_warmup_steps", "lr_decay_start", "lr_decay_steps")
        if self.lr_decay_steps and self.lr_decay_start < self.lr_warmup_steps:
            raise InvalidField("lr_decay_start", "the decay must start after the warm-up (lr_warmup_steps)")


@dataclass
class TrainingConfig:
    """The loop."""

    epochs: int = 1
    batch_size: int = 32
    """Rows of one rank in a step."""
    test_batch_size: int | None = None
    """Rows of one rank in a step of the evaluation; by default ``batch_size``."""
    drop_last_training_batch: bool = False
    limit_train_batches: int | None = None
    limit_val_batches: int | None = None
    validation_freq_within_epoch: int | None = None
    """Evaluate every that many steps, besides the end of each epoch."""
    patience: int | None = None
    """Stop after that many evaluations in a row without a better (lower) NE; by default train all epochs."""
    target_auroc: float | None = None
    """Stop when an evaluation has this AUROC, like MLPerf's 0.8025 (DLRM) and 0.80275 (DCNv2)."""
    seed: int = 0
    device: Literal["cpu", "cuda"] | None = None
    """By default FLOWTT_DEVICE, else cuda if there is a GPU."""
    threads: int | None = None
    """CPU threads of a process; by default the cores divided by the processes of the host."""
    start_timeout: float = 120.0
    """Seconds that a rank waits at the start for the others; after it, collectives have torch's own time-outs."""
    log_every: int = 50
    stop_on_nonfinite: bool = True
    """Stop when a loss, a weight or a prediction is not a finite number. Such a model is not saved in either case."""
    prefetch_batches: int = 2
    """Batches that a thread makes ahead of the step."""
    profile_steps: int = 8
    """Steps that are profiled for the breakdown at the end; 0 turns it off."""
    allow_tf32: bool = False

    def __post_init__(self) -> None:
        _at_least(self, 1, "batch_size", "test_batch_size", "limit_train_batches", "limit_val_batches")
        _at_least(self, 1, "validation_freq_within_epoch", "threads", "log_every", "epochs", "prefetch_batches")
        _at_least(self, 1, "patience")
        _at_least(self, 0, "profile_steps")
        _positive(self, "start_timeout", "target_auroc")
        if self.target_auroc is not None and self.target_auroc > 1:
            raise InvalidField("target_auroc", f"must be at most 1, not {self.target_auroc}")


@dataclass
class PlannerConfig:
    """The machine that the planner plans for; what is left out is TorchRec's default."""

    hbm: int | str | None = None
    """GPU memory of a rank, like ``80GB``."""
    ddr: int | str | None = None
    """Host memory of a rank."""
    plan: str | None = None
    """A plan to use, as ``save_plan`` wrote it: it also says which tables are tensor trains, and of which shape."""
    costs: str | None = None
    """Cost constants that ``python -m flowtt_torchrec calibrate`` wrote; by default those of a data sheet."""
    save_plan: str | None = None
    """Where to write the plan, as JSON."""
    storage_reservation: float = 0.05
    """Share of the GPU memory kept free for what the planner does not see."""

    def __post_init__(self) -> None:
        _check_size(self, "hbm")
        _check_size(self, "ddr")
        if not 0 <= self.storage_reservation < 1:
            raise InvalidField("storage_reservation", f"must be from 0 to below 1, not {self.storage_reservation}")


@dataclass
class CheckpointConfig:
    """Checkpoints; none are written without a directory."""

    directory: str | None = None
    every: int | None = None
    """Steps between checkpoints; by default at the end of each epoch. Within an epoch, an evaluation that is the best
    so far or the last writes one as well."""
    keep: int = 2
    """The latest that many are kept, and besides them the one of the best NE."""
    overwrite: bool = False
    """A fresh run removes the checkpoints of an earlier one instead of refusing to start beside them."""
    accept_other_data: bool = False
    """``--resume`` continues though the files of the data are not those that the checkpoint was trained on."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "every", "keep")


@dataclass
class ReportConfig:
    """What is left behind and printed."""

    directory: str | None = None
    """Of report.json and TensorBoard's files; by default runs/<name of the config file>."""
    tensorboard: bool = True
    """Write TensorBoard's files if it is installed."""
    print_sharding_plan: bool = False


@dataclass
class TrainConfig:
    """All settings of a run."""

    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    report: ReportConfig = field(default_factory=ReportConfig)


def _at_least(section: object, least: int, *fields: str) -> None:
    for name in fields:
        value = getattr(section, name)
        if value is not None and value < least:
            raise InvalidField(name, f"must be at least {least:,}, not {value:,}")


def _positive(section: object, *fields: str) -> None:
    for name in fields:
        value = getattr(section, name)
        if value is not None and not value > 0:
            raise InvalidField(name, f"must be above 0, not {value}")


def _check_size(section: object, name: str) -> None:
    try:
        if getattr(section, name) is not None:
            parse_bytes(getattr(section, name))
    except ValueError as error:
        raise InvalidField(name, str(error)) from None


def _check_shape_choice(section: TableCompression | CompressionConfig) -> None:
    _at_least(section, 1, "rank")
    if section.num_cores is not None and not MIN_CORES <= section.num_cores <= MAX_CORES:
        raise InvalidField("num_cores", f"must be {MIN_CORES} to {MAX_CORES}, not {section.num_cores}")
    if section.objective is not None and section.objective not in OBJECTIVES:
        hint = did_you_mean(section.objective, OBJECTIVES)
        raise InvalidField("objective", f"{section.objective!r} is unknown; known: {', '.join(OBJECTIVES)}{hint}")
