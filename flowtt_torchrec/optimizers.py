"""Fused optimizers on cores: which there are, their hyper-parameters, and their state.

All core gradients are taken at the weights before the step, which is then made only on slices ``G_k[i_k]`` that the
batch looked up. With ``g = gradient + weight_decay * w``:

* ``"sgd"``: ``w -= learning_rate * g``
* ``"adagrad"``: ``m += g**2``, ``w -= learning_rate * g / (sqrt(m) + eps)``, one ``m`` an element
* ``"rowwise_adagrad"``: ``m += mean(g**2)`` over the slice, the same update, one ``m`` a slice

They are torch.optim's SGD and Adagrad and FBGEMM's row-wise Adagrad, a slice taking the place of a row. And, with the
plain ``gradient``, ``t`` the number of the step, and both averages one an element:

* ``"adam"``: ``m = beta1 * m + (1 - beta1) * gradient``, ``v = beta2 * v + (1 - beta2) * gradient**2``,
  ``w -= learning_rate * (m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps) + weight_decay * w)``

Where ``sqrt(...) + eps`` is 0, as a gradient of 0 and an ``eps`` of 0 make it, it counts as 1: there is no step but
that of weight decay. torch.optim and FBGEMM divide 0 by 0 there.

This is ``EmbOptimType.ADAM`` of FBGEMM: torch.optim.AdamW on what was looked up. Steps are counted from 1, also those
in which a slice was not looked up, and table by table: tables that are stepped together may have begun at different
times.

Cores in bfloat16 or float16 are widened, stepped in float32 and rounded; see `flowtt_torchrec.precision`. Momenta stay
float32. Steps are counted for these cores too, since the random bits of their rounding come from the step's number.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowtt_torchrec.layout import NUM_CORES, SLICE_OFFSETS, TTLayout
from flowtt_torchrec.precision import TO_NEAREST, compute_dtype, is_reduced, round_weights, rounding_seed, seed_of_step
from flowtt_torchrec.spec import MAX_CORES

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = "sgd", "adagrad", "rowwise_adagrad", "adam"
KINDS = (SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM)  # an optimizer's place here is its number in the compiled ops

ROUNDING_BLOCK = 1 << 16  # numbers that `apply_gradient` rounds at a time: random bits take much memory
MOMENTUM1, MOMENTUM2, STEP = "momentum1", "exp_avg_sq", "step"  # as TorchRec names the state of its fused optimizers


@dataclass(frozen=True)
class OptimizerSpec:
    """A fused optimizer and its hyper-parameters.

    Args:
        kind: ``"sgd"``, ``"adagrad"``, ``"rowwise_adagrad"`` or ``"adam"``.
        learning_rate: step size.
        eps: added to the root of the accumulator; not used by SGD.
        weight_decay: of slices that the batch looked up: an L2 penalty added to their gradient, or beside it for Adam.
        beta1: decay of Adam's average of gradients.
        beta2: decay of Adam's average of squared gradients.
        stochastic_rounding: whether updated cores in bfloat16 or float16 are rounded stochastically, not to nearest.

    Raises:
        ValueError: for an unknown kind, a negative number or a decay that is not below 1.
    """

    kind: str
    learning_rate: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    stochastic_rounding: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown fused optimizer {self.kind!r}; known: {', '.join(KINDS)}")
        for field in ("learning_rate", "eps", "weight_decay"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{self.kind} needs {field} of at least 0, not {getattr(self, field)}")
        for field in ("beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"{self.kind} needs {field} of at least 0 and below 1, not {getattr(self, field)}")

    @property
    def needs_touched(self) -> bool:
        """Whether a slice whose gradient is 0 is stepped differently from one that was not looked up."""
        return self.kind == ADAM or self.weight_decay > 0

    def rounding_seed(self, dtype: torch.dtype, seed: int) -> int:
        """How cores of a type are rounded: the seed of the random bits of step 0, or `TO_NEAREST`."""
        return rounding_seed(seed) if self.stochastic_rounding and is_reduced(dtype) else TO_NEAREST


def state_names(kind: str, dtype: torch.dtype = torch.float32) -> tuple[str, ...]:
    """Names of the state tensors that an optimizer keeps for cores of a type, as TorchRec calls them."""
    if kind == ADAM:
        return MOMENTUM1, MOMENTUM2, STEP
    momenta = () if kind == SGD else (MOMENTUM1,)
    return (*momenta, STEP) if is_reduced(dtype) else momenta


def init_state(
    layout: TTLayout, kind: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """State of an optimizer before its first step: zeros, one an element, or one a slice for row-wise Adagrad.

    ``dtype`` is that of the cores; for narrower ones than float32 the state is float32.

    ``"step"``, the number of steps that each table has made so far, is int64 ``[num_tables]`` and always on the CPU,
    where it is read.
    """
    size = layout.num_slices if kind == ROWWISE_ADAGRAD else layout.num_parameters
    return {
        name: torch.zeros(layout.num_tables, dtype=torch.int64, device="cpu")
        if name == STEP
        else torch.zeros(size, dtype=compute_dtype(dtype), device=device)
        for name in state_names(kind, dtype)
    }


def split_state(layout: TTLayout, kind: str, state: Mapping[str, Tensor]) -> dict[str, list[dict[str, Tensor]]]:
    """Views of the state by table and core: shaped as the core, or ``[p_k]`` for row-wise Adagrad; ``step`` ``[]``."""
    split: dict[str, list[dict[str, Tensor]]] = {
        name: [{} for _ in spec.p] for name, spec in zip(layout.names, layout.specs)
    }
    views_of = layout.slice_views if kind == ROWWISE_ADAGRAD else layout.core_views
    for state_name, flat in state.items():
        if state_name == STEP:
            views = [[of_table] * spec.num_cores for of_table, spec in zip(flat.unbind(), layout.specs)]
        else:
            views = views_of(flat)
        for name, of_table in zip(layout.names, views):
            for core_state, view in zip(split[name], of_table):
                core_state[state_name] = view
    return split


@torch.no_grad()
def apply_gradient(
    layout: TTLayout,
    optimizer: OptimizerSpec,
    weights: Tensor,
    state: Mapping[str, Tensor],
    grad: Tensor,
    touched: Tensor | None = None,
    seed: int = 0,
) -> None:
    """One step from a gradient that is already summed, for cores that several ranks hold. In place.

    The same step as that of a fused lookup, but for the random bits of rounding: these depend on a table's name and not
    on where it lies in the weights. Equal arguments give equal bits, so replicas stay equal.

    Args:
        layout: the tables.
        optimizer: the optimizer, with the learning rate of this step.
        weights: the cores of all tables, ``[layout.num_parameters]``.
        state: as `init_state` makes it.
        grad: gradient of ``weights``, not rounded to their type, zero on slices that no batch looked up.
        touched: bool ``[layout.num_slices]``, slices that some batch looked up; read by Adam, and where there is
            weight decay.
        seed: of stochastic rounding.

    Raises:
        ValueError: for weight decay or Adam without ``touched``.
    """
    if optimizer.needs_touched and touched is None:
        raise ValueError(
            f"{'Adam' if optimizer.kind == ADAM else 'weight decay'} changes touched slices only, so it must be known "
            "which those are"
        )
    steps = [0] * layout.num_tables
    if STEP in state:
        state[STEP].add_(1)
        steps = state[STEP].tolist()
    changed = weights.to(compute_dtype(weights.dtype))
    _step(layout, optimizer, steps, changed, state, grad, touched)
    if changed is weights:
        return
    sizes = [spec.num_parameters for spec in layout.specs]
    for name, step, stored, values in zip(layout.names, steps, weights.split(sizes), changed.split(sizes)):
        table_seed = seed_of_step(optimizer.rounding_seed(weights.dtype, seed + zlib.crc32(name.encode())), step)
        for first in range(0, stored.numel(), ROUNDING_BLOCK):
            last = min(first + ROUNDING_BLOCK, stored.numel())
            elements = torch.arange(first, last, device=stored.device)
            stored[first:last] = round_weights(values[first:last], weights.dtype, table_seed, elements)


def _step(
    layout: TTLayout,
    optimizer: OptimizerSpec,
    steps: Sequence[int],
    weights: Tensor,
    state: Mapping[str, Tensor],
    grad: Tensor,
    touched: Tensor | None,
) -> None:
    if optimizer.kind == ADAM:
        assert touched is not None
        flat = weights, state[MOMENTUM1], state[MOMENTUM2], grad, _spread(layout, touched)
        for step, run in _runs(layout, steps):
            _adam_step(optimizer, step, *(tensor[run] for tensor in flat))
        return
    if optimizer.weight_decay:
        assert touched is not None
        grad = grad + optimizer.weight_decay * (weights * _spread(layout, touched))
    if optimizer.kind == SGD:
        weights.sub_(grad, alpha=optimizer.learning_rate)
        return
    momentum1 = state[MOMENTUM1]
    if optimizer.kind == ADAGRAD:
        momentum1.addcmul_(grad, grad)
        root = divisor(momentum1, optimizer.eps)
    else:
        for core_grads, moments in zip(layout.core_views(grad), layout.slice_views(momentum1)):
            for core_grad, moment in zip(core_grads, moments):
                moment.add_(core_grad.square().mean(dim=(1, 2, 3)))
        root = _spread(layout, divisor(momentum1, optimizer.eps))
    weights.addcdiv_(grad, root, value=-optimizer.learning_rate)


def _adam_step(
    optimizer: OptimizerSpec,
    step: int,
    weights: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    grad: Tensor,
    touched: Tensor,
) -> None:
    """The step on elements where ``touched`` is true; all tensors are of equal size."""
    moment1.copy_(torch.where(touched, optimizer.beta1 * moment1 + (1 - optimizer.beta1) * grad, moment1))
    moment2.copy_(torch.where(touched, optimizer.beta2 * moment2 + (1 - optimizer.beta2) * grad * grad, moment2))
    root = divisor(moment2 / (1 - optimizer.beta2**step), optimizer.eps)
    change = (moment1 / (1 - optimizer.beta1**step)).div_(root).add_(weights, alpha=optimizer.weight_decay)
    weights.sub_(change.mul_(touched), alpha=optimizer.learning_rate)


def _runs(layout: TTLayout, steps: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Neighbouring tables that are at the same step: its number, and where their cores are in the flat buffer."""
    first = 0
    for step, run in itertools.groupby(zip(layout.specs, steps), key=lambda table: table[1]):
        end = first + sum(spec.num_parameters for spec, _ in run)
        yield step, slice(first, end)
        first = end


def divisor(squares: Tensor, eps: float) -> Tensor:
    """``sqrt(squares) + eps``, and 1 where that is 0: there has been no gradient then, and there is no step."""
    root = squares.sqrt().add_(eps)
    return root.masked_fill_(root == 0, 1)


def touched_slices(layout: TTLayout, row_keys: Tensor) -> Tensor:
    """Which slices some rows are made of.

    Args:
        layout: the tables.
        row_keys: int64 ``[N]``, keys of rows, as a flow plan has them.

    Returns:
        bool ``[layout.num_slices]``.
    """
    first = layout.tables[:, SLICE_OFFSETS : SLICE_OFFSETS + MAX_CORES].to(row_keys.device)
    real = torch.arange(MAX_CORES, device=row_keys.device) < layout.tables[:, NUM_CORES, None].to(row_keys.device)
    tables, digits = layout.split_keys(row_keys)
    touched = torch.zeros(layout.num_slices, dtype=torch.bool, device=row_keys.device)
    touched[(first[tables] + digits)[real[tables]]] = True
    return touched


def leave_out(layout: TTLayout, trained: Sequence[bool], grad: Tensor, touched: Tensor | None) -> None:
    """Takes cores that are not trained out of a gradient, and of the slices that were looked up, in place.

    Args:
        layout: the tables.
        trained: for each core of all tables, whether it is.
        grad: ``[layout.num_parameters]``.
        touched: bool ``[layout.num_slices]``, if it is known.
    """
    if all(trained):
        return
    pieces = [layout.core_views(grad)] + ([] if touched is None else [layout.slice_views(touched)])
    for of_tables in pieces:
        for is_trained, piece in zip(trained, (piece for of_table in of_tables for piece in of_table)):
            if not is_trained:
                piece.zero_()


def _spread(layout: TTLayout, slices: Tensor) -> Tensor:
    """A value a slice ``[num_slices]``, on every element of the slice, ``[num_parameters]``."""
    sizes = [size // p for spec in layout.specs for size, p in zip(spec.core_sizes, spec.p)]
    counts = [p for spec in layout.specs for p in spec.p]
    repeats = torch.tensor(sizes).repeat_interleave(torch.tensor(counts)).to(slices.device)
    return slices.repeat_interleave(repeats, output_size=layout.num_parameters)
