"""Training of TT tables under TorchRec, held step by step to plain autograd on one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torchrec.optim
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from twins import Optimizer, Reference, Table, feature_rows, full_state, make_batch, materialised, shard

TOLERANCE = 1e-4  # of weights, outputs and losses, after any number of steps

# eps well above rounding: where a gradient is all but zero, Adagrad would turn its rounding error into a full step
SGD: Optimizer = ("sgd", torch.optim.SGD, {"lr": 0.2})
SGD_DECAY: Optimizer = ("sgd", torchrec.optim.SGD, {"lr": 0.2, "weight_decay": 0.05})
ADAGRAD: Optimizer = ("adagrad", torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-3})
ADAGRAD_DECAY: Optimizer = ("adagrad", torchrec.optim.Adagrad, {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.02})
ROWWISE: Optimizer = ("rowwise_adagrad", torchrec.optim.RowWiseAdagrad, {"lr": 0.02, "eps": 1e-3})
ROWWISE_DECAY: Optimizer = (*ROWWISE[:2], {**ROWWISE[2], "weight_decay": 0.02})
ADAM: Optimizer = ("adam", torch.optim.Adam, {"lr": 0.01, "eps": 1e-3, "betas": (0.8, 0.95)})
ADAM_DECAY: Optimizer = (*ADAM[:2], {**ADAM[2], "weight_decay": 0.02})

ROW_WISE = ("rw", "twrw0", "twrw1")
Batch = tuple[KeyedJaggedTensor, KeyedJaggedTensor, Tensor]  # what the model gets, the same written out, targets


def batches_of(tables: Sequence[Table], world_size: int, step: int, mode: str) -> list[Batch]:
    """One batch a rank, of sizes that differ, unless gloo's gather of row-wise gradients needs them equal."""
    row_wise = any(table.place in ROW_WISE for table in tables)
    batches = []
    for rank in range(world_size):
        seed = 100 * step + rank
        weighted = "weighted" in mode
        if "variable" in mode:
            batches.append(make_variable_batch(tables, seed, 0 if row_wise else rank, weighted=weighted))
        else:
            size = 5 + (0 if row_wise else 4 * rank)
            features, targets = make_batch(tables, size, seed, weighted=weighted)
            batches.append((features, features, targets))
    return batches


def make_variable_batch(tables: Sequence[Table], seed: int, more: int, *, weighted: bool = False) -> Batch:
    """Features of samples that repeat, each with a batch size of its own, and the same written out."""
    generator = torch.Generator().manual_seed(seed)
    rows, samples = feature_rows(tables), 6
    names = list(rows)
    lengths, values, factors, inverse = [], [], [], []
    full_lengths, full_values, full_factors = [], [], []
    for i, name in enumerate(names):
        stride = 2 + (i + more) % 3
        length = torch.randint(0, 4, (stride,), generator=generator)
        ids = torch.randint(0, rows[name], (int(length.sum()),), generator=generator)
        weights = torch.rand(ids.numel(), generator=generator) + 0.5
        of_sample = torch.randint(0, stride, (samples,), generator=generator)
        lengths.append(length)
        values.append(ids)
        factors.append(weights)
        inverse.append(of_sample)
        full_lengths.append(length[of_sample])
        full_values += [ids.split(length.tolist())[b] for b in of_sample.tolist()]
        full_factors += [weights.split(length.tolist())[b] for b in of_sample.tolist()]
    variable = KeyedJaggedTensor(
        keys=names,
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        weights=torch.cat(factors) if weighted else None,
        stride_per_key_per_rank=[[length.numel()] for length in lengths],
        inverse_indices=(names, torch.stack(inverse)),
    )
    full = KeyedJaggedTensor(
        keys=names,
        values=torch.cat(full_values),
        lengths=torch.cat(full_lengths),
        weights=torch.cat(full_factors) if weighted else None,
    )
    return variable, full, torch.randn(samples, generator=generator)


def trainable(tables: Iterable[Table], kind: str, mode: str) -> list[Table]:
    """The tables without those that TorchRec itself does not train as the reference does."""

    def stock_can(table: Table) -> bool:
        of_table = table.optimizer[0] if table.optimizer else kind
        if of_table == "rowwise_adagrad" and isinstance(table.place, tuple):
            return False  # one accumulator a shard of a row, not one a row
        return "variable" not in mode or (of_table != "adagrad" and table.place != "dp")  # FBGEMM's CPU kernels

    return [table for table in tables if table.spec is not None or stock_can(table)]


def dense_optimizer_like(optimizer: Optimizer) -> Any:
    """Makes torch's optimizer for what is data-parallel."""
    kind, _, kwargs = optimizer
    dense_class = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}.get(kind, torch.optim.Adagrad)
    kwargs = {name: value for name, value in kwargs.items() if name != "weight_decay"}
    return lambda parameters: dense_class(parameters, **kwargs)


def all_of_them(
    model: DistributedModelParallel, reference: Reference, optimizer: Optimizer
) -> tuple[CombinedOptimizer, list[torch.optim.Optimizer]]:
    """All optimizers of the model, and those of the reference that torch has: of data-parallel tables and the rest."""
    left = dict(in_backward_optimizer_filter(model.named_parameters()))
    combined, plain = [model.fused_optimizer], []
    for table in reference.tables:
        if table.place == "dp" and table.optimizer is not None:
            make = dense_optimizer_like(table.optimizer)
            own = {name: left.pop(name) for name in list(left) if f"embedding_bags.{table.name}." in name}
            combined.append(KeyedOptimizerWrapper(own, make))
            plain.append(make(reference.of_table(table)))
    make = dense_optimizer_like(optimizer)
    others = [table.name for table in reference.tables if table.place == "dp" and table.optimizer is None]
    combined.append(KeyedOptimizerWrapper(left, make))
    plain.append(make([*reference.over.parameters(), *reference.leaves(others)]))
    return CombinedOptimizer(combined), plain


def same_training(
    rank: int,
    world_size: int,
    tables: Sequence[Table],
    optimizer: Optimizer,
    mode: str = "sum",
    steps: int = 10,
) -> None:
    """Every step must give the reference's columns and loss, and the end its weights, replicas equal to the bit.

    Args:
        mode: one or several of the words sum, mean, weighted, and variable for a batch size a feature; with "as is"
            tables keep their own pooling.
        optimizer: of tables without one of their own, and of the dense layers.
    """
    kind, optimizer_class, kwargs = optimizer
    tables = trainable(tables, kind, mode)
    if "as is" not in mode:
        pooling = PoolingType.MEAN if "mean" in mode else PoolingType.SUM
        tables = [dataclasses.replace(table, pooling=pooling) for table in tables]
    weighted = "weighted" in mode
    model = shard(tables, world_size, (optimizer_class, kwargs), weighted=weighted)
    start = full_state(model, tables)
    reference = Reference(tables, start, model.module.over)
    optimizers, plain = all_of_them(model, reference, optimizer)
    settings = {name: kwargs[name] for name in ("betas",) if name in kwargs}
    for step in range(steps):
        batches = batches_of(tables, world_size, step % 3, mode)
        features, written_out, targets = batches[rank]
        optimizers.zero_grad()
        output, columns = model(features)
        loss = (output - targets).square().mean()
        loss.backward()
        optimizers.step()

        for parameter in [*reference.over.parameters(), *reference.parameters.values()]:
            parameter.grad = None
        torch.testing.assert_close(columns, reference.columns(written_out), atol=TOLERANCE, rtol=0)
        expected = reference.loss([(full, y) for _, full, y in batches])
        expected.backward()
        for of_some in plain:
            of_some.step()
        decay = kwargs.get("weight_decay", 0.0)
        given = [(features, y) for features, _, y in batches]  # touched: also bags that no sample is made of
        reference.fused_step(given, kind, kwargs["lr"], kwargs.get("eps", 0.0), decay, **settings)
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / world_size, expected.detach(), atol=TOLERANCE, rtol=0)
    end = full_state(model, tables)
    for name, value in reference.state().items():
        torch.testing.assert_close(end[name], value, atol=TOLERANCE, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
        assert not torch.equal(end[name], start[name]), f"{name} did not train"
    if mode in ("sum", "weighted"):
        same_outputs(model, tables, mode, steps=1)


def same_outputs(model: DistributedModelParallel, tables: Sequence[Table], mode: str, steps: int) -> None:
    """A stock twin, whose weights are the materialised cores, must give the same."""
    twin = shard(tables, dist.get_world_size(), dense=True, weighted="weighted" in mode)
    dense_state = materialised(tables, full_state(model, tables))
    over = {name: value for name, value in model.state_dict().items() if "over" in name}
    assert not twin.load_state_dict(dense_state | over).unexpected_keys
    for step in range(steps):
        features, _, _ = batches_of(tables, dist.get_world_size(), 10 + step, mode)[dist.get_rank()]
        for ours, expected in zip(model(features), twin(features)):
            assert expected.abs().max() > 0.01
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
