"""The whole job: from settings to a trained model and its report."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from flowtt_torchrec import ops
from flowtt_torchrec.datasets import Sharding
from flowtt_torchrec.training.checkpoint import Checkpoints
from flowtt_torchrec.training.config import TrainConfig
from flowtt_torchrec.training.console import Console, show_bytes
from flowtt_torchrec.training.data import make_dataset
from flowtt_torchrec.training.errors import CheckpointError, UserError
from flowtt_torchrec.training.evaluation import evaluate_checkpoint
from flowtt_torchrec.training.folders import held, try_folder
from flowtt_torchrec.training.loop import History, Position, Trainer
from flowtt_torchrec.training.model import LearningRate, build_optimizer, shard
from flowtt_torchrec.training.options import DryRun, Invocation
from flowtt_torchrec.training.planning import Machine, Planning, print_planner_logs, this_machine
from flowtt_torchrec.training.quiet import quiet_libraries
from flowtt_torchrec.training.report import build_report, show_breakdown, show_metrics, write_report
from flowtt_torchrec.training.resume import RunState, SavedRun, placement_is_free
from flowtt_torchrec.training.runtime import Runtime, choose_device, decide_on_main, process_group
from flowtt_torchrec.training.tables import planned_tables, show_plan, show_summary


def run(invocation: Invocation) -> None:
    """Trains, evaluates or plans only, as the command line asks for.

    Raises:
        UserError: something the user gave is wrong.
        DataError: the data is.
    """
    quiet_libraries()
    console = Console(enabled=int(os.environ.get("RANK", 0)) == 0)
    if invocation.dry_run is not None:
        if console.enabled:
            dry_run(invocation.config, invocation.dry_run, console)
        return
    _check_backend()
    training = invocation.config.training
    if invocation.evaluate is not None:  # only reads checkpoints: a run may be writing others
        with process_group(choose_device(training.device), training.threads, training.start_timeout) as runtime:
            evaluate_checkpoint(invocation.config, invocation.evaluate, _report_directory(invocation), runtime, console)
        return
    with (
        process_group(choose_device(training.device), training.threads, training.start_timeout) as runtime,
        _held_folders(invocation, runtime, console),
    ):
        train(invocation, runtime, console)


@contextmanager
def _held_folders(invocation: Invocation, runtime: Runtime, console: Console) -> Iterator[None]:
    """Tries the folders that the job writes to, and holds that of its checkpoints. All ranks call it together.

    Raises:
        UserError: a folder cannot be written to, or is in use, or is not one for all hosts.
    """
    config = invocation.config
    with ExitStack() as stack:
        if runtime.is_main:
            try_folder("report.directory", _report_directory(invocation))
            if config.planner.save_plan is not None:
                try_folder("planner.save_plan", Path(config.planner.save_plan).parent)
        if config.checkpoint.directory is not None:
            directory = Path(config.checkpoint.directory)
            if runtime.is_main:
                try_folder("checkpoint.directory", directory)
                left = stack.enter_context(held(directory))
                if left is not None:
                    console.say(left)
            dist.barrier()
            if not directory.is_dir():
                raise UserError(
                    f"checkpoint.directory: {directory} is not on host {socket.gethostname()}, though rank 0 has made "
                    "it; it must be on a file system that all hosts share"
                )
            try_folder("checkpoint.directory", directory)
        yield


def _report_directory(invocation: Invocation) -> Path:
    return Path(invocation.config.report.directory or Path("runs") / invocation.name)


def _check_backend() -> None:
    """Raises `UserError` if the ops cannot run, before minutes have gone into data and plan."""
    backend = ops.backend_info()
    if backend.name == "native" and backend.error is not None:
        raise UserError(
            f"the compiled ops cannot be used: {backend.error}. Build them with `make setup`, or set "
            "FLOWTT_BACKEND=reference to run the slow, plain PyTorch definition"
        )


def dry_run(config: TrainConfig, machine: DryRun, console: Console) -> None:
    """Plans for a machine that need not be there, and prints the plan."""
    kind = choose_device(config.training.device, must_exist=False)
    dataset = make_dataset(config.data, Sharding(config.training.batch_size, 0, 1))  # of which no rows are taken
    if config.report.print_sharding_plan:
        print_planner_logs()
    planning = Planning(
        config, dataset, Machine(kind, machine.world_size, machine.local_world_size), torch.device("meta")
    )
    plan = planning.plan()
    planned = planned_tables(planning.tables, planning.specs, plan, machine.world_size)
    show_plan(console, planned)
    console.say()
    planning.compression.show()
    console.say(show_summary(planned))
    weights = [0] * machine.world_size
    for table in planned:
        for rank, size in table.weight_bytes_by_rank.items():
            weights[rank] += size
    console.say(
        f"dry run for {machine.world_size} ranks on {kind}, batch {machine.world_size} x {config.training.batch_size}: "
        f"{show_bytes(min(weights))} to {show_bytes(max(weights))} of table weights a rank"
    )


def train(invocation: Invocation, runtime: Runtime, console: Console) -> None:
    """Trains and reports. All ranks call it together."""
    config = invocation.config
    training = config.training
    torch.manual_seed(training.seed)
    torch.backends.cuda.matmul.allow_tf32 = training.allow_tf32
    checkpoints, last_step = _open_checkpoints(invocation, runtime, console)
    ranks = (runtime.rank, runtime.world_size)
    train_data = make_dataset(config.data, Sharding(training.batch_size, *ranks))
    val_data = train_data
    if training.test_batch_size is not None and training.test_batch_size != training.batch_size:
        val_data = make_dataset(config.data, Sharding(training.test_batch_size, *ranks))
    for note in train_data.notes:
        console.say(f"data: {note}")
    train_data.check_rows("train")
    val_data.check_rows("val")

    if config.report.print_sharding_plan and runtime.is_main:
        print_planner_logs()
    saved = saved_types = saved_trains = None
    if checkpoints is not None and last_step is not None:
        saved = SavedRun.read(checkpoints, last_step)
        if (warning := saved.check(config, train_data)) is not None:
            console.say(f"--resume: {warning}")
        saved_types = None if placement_is_free(config.optimizer) else saved.sharding_types()
        saved_trains = set(saved.specs)
    planning = Planning(config, train_data, this_machine(runtime), runtime.device, saved_types, saved_trains)
    plan = planning.plan(dist.group.WORLD)
    planned = planned_tables(planning.tables, planning.specs, plan, runtime.world_size)
    if config.report.print_sharding_plan:
        show_plan(console, planned)
    console.say(show_summary(planned))
    model = shard(planning.model, plan, planning.sharders, runtime.device)
    optimizer = build_optimizer(model, config.optimizer)
    console.say(
        f"training on {runtime.world_size} x {runtime.device.type}, {torch.get_num_threads()} threads a process, "
        f"batch {runtime.world_size} x {training.batch_size}"
    )

    directory = _report_directory(invocation)
    state = RunState(config, runtime, model, optimizer, planning.specs, planned, train_data.identity())

    def save(position: Position, history: History) -> Path:
        assert checkpoints is not None
        return state.save(checkpoints, position, history)

    def mark_best(step: int) -> None:
        if checkpoints is not None and runtime.is_main:
            checkpoints.mark_best(step)

    log, close_log = _tensorboard(directory, config, runtime)
    trainer = Trainer(
        training,
        config.checkpoint,
        runtime,
        console,
        model,
        optimizer,
        LearningRate(optimizer, config.optimizer),
        train_data,
        val_data,
        save,
        mark_best,
        log,
    )
    if checkpoints is not None and saved is not None:
        state.load(checkpoints, saved)
        trainer.resume(saved.position, saved.history, saved.path)
        console.say(f"continuing from {saved.path}")
    trainer.run()
    close_log()

    report = build_report(config, runtime, planned, trainer, train_data.notes, checkpoints)
    if not runtime.is_main:
        return
    console.say()
    show_breakdown(console, trainer.profiler.breakdown, runtime.device.type == "cuda")
    console.say()
    planning.compression.show()
    console.say()
    show_metrics(console, report)
    try:
        write_report(directory / "report.json", report)
    except OSError as error:
        raise UserError(f"report.directory: cannot write {directory / 'report.json'}: {error.strerror}") from None
    console.say(f"report: {directory / 'report.json'}")


def _open_checkpoints(
    invocation: Invocation, runtime: Runtime, console: Console
) -> tuple[Checkpoints | None, int | None]:
    """The run's checkpoints, and the step to continue from."""
    config = invocation.config.checkpoint
    if config.directory is None:
        return None, None
    checkpoints = Checkpoints(config.directory, config.keep)
    steps = decide_on_main(runtime, checkpoints.steps)
    if invocation.resume:
        if not steps:
            console.say(f"--resume: there is no checkpoint in {config.directory} yet, starting from scratch")
        return checkpoints, steps[-1] if steps else None
    if steps and not config.overwrite:
        raise CheckpointError(
            f"{config.directory} has checkpoints of an earlier run, the last of step {steps[-1]}; continue it with "
            "--resume, choose another directory, or remove them with --set checkpoint.overwrite=true"
        )
    if steps:
        decide_on_main(runtime, checkpoints.remove_all)
        console.say(f"removed {len(steps)} checkpoints of an earlier run from {config.directory}")
    return checkpoints, None


def _tensorboard(
    directory: Path, config: TrainConfig, runtime: Runtime
) -> tuple[Callable[[str, float, int], None], Callable[[], None]]:
    """A function that logs a number, and one that ends the log; both do nothing unless TensorBoard is installed."""
    if config.report.tensorboard and runtime.is_main:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            pass
        else:
            writer = SummaryWriter(str(directory / "tensorboard"))
            return writer.add_scalar, writer.close
    return lambda name, value, step: None, lambda: None
