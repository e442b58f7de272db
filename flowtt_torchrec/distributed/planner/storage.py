"""Bytes that a TT table takes on a rank: what stays between steps, and what a step adds at its worst moment.

Counted are the tensors that torch allocates, on the CPU those of the whole step as ``torch.profiler`` sees them
(``tests/distributed/test_storage.py`` compares). Rows that a rank receives from others are counted where they are
computed, so the sum over the ranks is right, and each rank's part where tables are spread evenly. The worst moments of
the tables of a plan are added up, though some do not coincide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torchrec.optim
from torchrec.distributed.types import PipelineType

from flowtt_torchrec.distributed.sharding_types import COLUMN_TYPES, DATA_PARALLEL, ROW_TYPES
from flowtt_torchrec.optimizers import ROUNDING_BLOCK
from flowtt_torchrec.spec import TTSpec

# A flow plan keeps two int32, one int64 and two int32 numbers a lookup.
PLAN_BYTES_PER_LOOKUP = 24
# While a plan is made: on the CPU two arrays of keys with positions; on a GPU keys, sorted keys and heads (int64),
# positions (int32), and the sort's own copies of keys and positions.
SORT_BYTES_PER_LOOKUP = {"cpu": 32, "cuda": 40}
ID_BYTES = 8  # ids, lengths and offsets are int64
FACTOR_BYTES = 4  # per-sample weights
ROUNDING_BYTES = 40  # while `precision.round_weights` rounds a number stochastically: five int64 at a time
FORWARDS_AHEAD = 2  # that wait for their backward at a time where `keep_forward_weights` is needed
# How many batches of ids a pipeline holds: those of the ranks' own batches, and those that were exchanged.
_BATCHES = {
    PipelineType.NONE: (1, 0),
    PipelineType.TRAIN_BASE: (2, 0),
    PipelineType.TRAIN_SPARSE_DIST: (3, 1),
    PipelineType.TRAIN_PREFETCH_SPARSE_DIST: (4, 2),
}


class Work(NamedTuple):
    """What one step does on a rank that holds a shard.

    Attributes:
        lookups: of all ranks' batches that the shard serves.
        bags: of all ranks' batches, over all features of the table; with data-parallel of its own batch.
        shards: of the table.
        world_size: ranks; 1 has no exchange.
        weighted: whether each lookup has a weight.
    """

    lookups: float
    bags: float
    shards: int
    world_size: int
    weighted: bool = False


@dataclass(frozen=True)
class TTTableBytes:
    """Bytes of one TT table, or of a shard of it, on one rank.

    Attributes:
        cores: weights.
        optimizer: fused state; of a data-parallel table that of the dense optimizer.
        gradient: ``.grad`` of a data-parallel table, which is a view of DDP's bucket. Fused tables keep none.
        input: ids, their weights and lengths of the batches that are held.
        step: the plan, pooled rows, their gradients and those of the cores, at the worst moment of a step.
    """

    cores: int
    optimizer: int
    gradient: int
    input: int = 0
    step: int = 0

    @property
    def total(self) -> int:
        return self.cores + self.optimizer + self.gradient + self.input + self.step


def table_bytes(
    spec: TTSpec,
    sharding_type: str,
    optimizer: type[torch.optim.Optimizer] | None,
    element_size: int = 4,
    *,
    work: Work | None = None,
    columns: int | None = None,
    device: str = "cpu",
    pipeline_type: PipelineType = PipelineType.NONE,
    keep_forward_weights: bool = False,
) -> TTTableBytes:
    """Counts what a table takes on one rank.

    Args:
        spec: the table's shape.
        sharding_type: TorchRec's name.
        optimizer: the class given to ``apply_optimizer_in_backward``, if any; a data-parallel table is taken to get a
            dense optimizer of the same class.
        element_size: bytes a number of the cores; data-parallel ones have a gradient and a state of the same type.
            Fused state, sums of gradients and rows have 4 or more.
        work: of a step; without it only what stays is counted.
        columns: width of a column-wise shard, all columns if not given.
        device: ``"cpu"`` or ``"cuda"``, whose kernels ask for other workspace.
        pipeline_type: the training pipeline, for the batches it holds.
        keep_forward_weights: whether the sharder has it, for loops in which two forwards wait for their backward, as
            in ``TrainPipelineSemiSync``: each has a plan, rows, and a copy of the cores.
    """
    cores = spec.num_bytes(element_size)
    data_parallel = sharding_type == DATA_PARALLEL
    state_size = element_size if data_parallel else max(element_size, 4)
    share = 1.0 if work is None else _share_of_cores(sharding_type, work)
    step = 0
    if work is not None:
        kept = keep_forward_weights and not data_parallel
        step = _step_bytes(spec, sharding_type, optimizer, element_size, work, columns, device, kept)
    return TTTableBytes(
        cores=math.ceil(share * cores),
        optimizer=math.ceil(share * _optimizer_bytes(spec, optimizer, state_size, data_parallel)),
        gradient=cores if data_parallel else 0,
        input=0 if work is None else _input_bytes(sharding_type, work, pipeline_type),
        step=step,
    )


def _optimizer_bytes(
    spec: TTSpec, optimizer: type[torch.optim.Optimizer] | None, state_size: int, data_parallel: bool
) -> int:
    if optimizer is None or optimizer in (torch.optim.SGD, torchrec.optim.SGD):
        return 0
    if optimizer is torchrec.optim.RowWiseAdagrad and not data_parallel:
        return spec.num_slices * state_size
    if optimizer in (torch.optim.Adam, torchrec.optim.Adam):
        return 2 * spec.num_bytes(state_size)
    return spec.num_bytes(state_size)


def _share_of_cores(sharding_type: str, work: Work) -> float:
    """Of a shard: a rank with several shards of columns has the cores once; shards are taken to spread evenly."""
    return min(1.0, work.world_size / work.shards) if sharding_type in COLUMN_TYPES else 1.0


def _update_bytes(
    spec: TTSpec, optimizer: type[torch.optim.Optimizer] | None, element_size: int, share: float, summed: bool
) -> float:
    """The most that holds while cores are stepped from a gradient of all of them, that gradient included.

    That is its flat copy while it is summed over the ranks, or what `optimizers.apply_gradient` holds.
    """
    whole = share * spec.num_bytes(max(element_size, 4))
    if optimizer is torchrec.optim.RowWiseAdagrad:
        copies = 3.0  # roots, and an int64 that spreads those of slices over their numbers
    elif optimizer in (torch.optim.Adam, torchrec.optim.Adam):
        copies = 3.25  # three terms, and which numbers were touched
    elif optimizer in (torch.optim.Adagrad, torchrec.optim.Adagrad):
        copies = 1.25  # roots, and which are 0
    else:
        copies = 0.0
    held, rounding = whole, 0.0
    if element_size < 4:  # a wide copy is stepped, then rounded block by block
        held, rounding = 2 * whole, share * ROUNDING_BYTES * min(spec.num_parameters, ROUNDING_BLOCK)
    return max(held + copies * whole, held + rounding, 2 * whole if summed else 0)


def _input_bytes(sharding_type: str, work: Work, pipeline_type: PipelineType) -> int:
    local, exchanged = _BATCHES[pipeline_type]
    of_lookups = work.lookups * (ID_BYTES + (FACTOR_BYTES if work.weighted else 0))
    if sharding_type == DATA_PARALLEL:
        return math.ceil(local * (of_lookups + ID_BYTES * work.bags))
    # The ranks' own batches have the ids of a column-wise table once; each of its shards is sent all of them.
    own = of_lookups / (work.shards if sharding_type in COLUMN_TYPES else 1) + ID_BYTES * work.bags / work.shards
    return math.ceil(local * own + exchanged * (of_lookups + ID_BYTES * work.bags))


def _step_bytes(
    spec: TTSpec,
    sharding_type: str,
    optimizer: type[torch.optim.Optimizer] | None,
    element_size: int,
    work: Work,
    columns: int | None,
    device: str,
    keep: bool,
) -> int:
    """The worst of the moments of a step; with ``keep`` another forward has been made before its backward."""
    number = max(element_size, 4)  # of rows, and of gradients of cores
    column_wise, shared = sharding_type in COLUMN_TYPES, sharding_type in (*ROW_TYPES, *COLUMN_TYPES)
    width = columns or spec.embedding_dim
    part = spec.narrow(width) if column_wise else spec
    pooled = number * work.bags * width  # rows as they are computed here, or the gradient of those
    received = pooled / work.shards if sharding_type in ROW_TYPES else pooled  # rows as the model gets them
    data_parallel = sharding_type == DATA_PARALLEL
    copied = part.num_bytes(element_size) if column_wise or keep else 0  # the cores, or those of some columns

    # from forward to backward
    kept = PLAN_BYTES_PER_LOOKUP * work.lookups + copied + (0 if data_parallel else ID_BYTES * (work.bags + 1))
    rows, sums = 0.0, 0.0
    if device != "cpu":  # the rows of all lookups or their gradients, and sums of the cores' gradients in fixed point
        rows, sums = number * work.lookups * width, 12 * part.num_parameters
    elif not shared and not data_parallel and not keep:  # for the first and last core; others are updated in place
        sums = number * (part.core_sizes[0] + part.core_sizes[-1])
    if shared or data_parallel or keep:
        sums += number * part.num_parameters  # the gradient that backward returns
    if data_parallel and number > element_size:
        sums += part.num_bytes(element_size)  # and as autograd wants it
    sorting = SORT_BYTES_PER_LOOKUP["cpu" if device == "cpu" else "cuda"] * work.lookups
    # The gradient of the rows that is computed with: without an exchange that which the model gives.
    own_gradient = 0 if data_parallel or work.world_size == 1 else pooled
    share = _share_of_cores(sharding_type, work)
    whole = number * spec.num_parameters * share if column_wise else 0
    # When cores are stepped backward is over for tables that ranks share, and else it is not.
    in_backward = 0 if shared else kept + own_gradient
    summed = shared and work.world_size > 1
    update = _update_bytes(spec, optimizer, element_size, share, summed) if shared or keep else 0
    moments = {
        "the plan is made": kept - copied + sorting,
        "rows are computed": kept + pooled + rows,
        # what the model got and gives back, a copy of that cut for each rank, and what comes of it
        "gradients of rows travel": kept + 2 * received + 2 * own_gradient,
        # for columns beside that of the whole table, which waits for the other ranks'
        "cores get gradients": kept + 2 * received + own_gradient + rows + sums + whole,
        "cores are updated": in_backward + 2 * received + update if update else 0,
    }
    ahead = (FORWARDS_AHEAD - 1) * (kept + received) if keep else 0
    return math.ceil(ahead + max(moments.values()))
