"""Every op in plain PyTorch: the definition that compiled kernels are held to.

Works on any device and for weights of any type in `flowtt_torchrec.precision`. A batch is grouped by the *flow plan*:
lookups are sorted by key (see `flowtt_torchrec.layout`), equal rows are taken together, and rows that share a prefix
(all digits but the last) form a *flow*, whose prefix product is computed once. Gathers are ``index_select``, whose
gradient, unlike that of indexing, is summed in a fixed order on the CPU.

The functions take the same arguments and return the same values as those of `flowtt_torchrec.native`.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from flowtt_torchrec.layout import NUM_EMBEDDINGS, TABLE_SHIFT, P, TTLayout
from flowtt_torchrec.optimizers import ADAM, ROWWISE_ADAGRAD, SGD, OptimizerSpec, divisor
from flowtt_torchrec.plan import BoundsCheckMode, Flow, FlowPlan, PoolingMode
from flowtt_torchrec.precision import TO_NEAREST, compute_dtype, round_weights, seed_of_step
from flowtt_torchrec.spec import MAX_CORES


def flow_plan(
    layout: TTLayout,
    indices: Tensor,
    offsets: Tensor,
    flow: Flow = Flow.PREFIX,
    bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
) -> FlowPlan:
    """Groups the lookups of a batch.

    Args:
        layout: the tables and features.
        indices: int32 or int64 ``[N]``, row numbers, feature by feature.
        offsets: int32 or int64 ``[num_features * batch_size + 1]``, first lookup of each bag, then ``N``.
        flow: how lookups are grouped.
        bounds_check_mode: what happens to a row number out of range.

    Raises:
        IndexError: for a row number out of range under ``FATAL``.
        RuntimeError: for offsets that do not describe the indices.
    """
    count, device = indices.numel(), indices.device
    batch_size = check_offsets(layout, count, offsets)
    bags = torch.arange(offsets.numel() - 1, device=device).repeat_interleave(offsets.diff(), output_size=count)
    tables, rows, invalid = check_rows(layout, indices, bags, batch_size, bounds_check_mode)
    keys = layout.keys(tables, rows)

    if flow == Flow.DIRECT:
        every = torch.arange(count + 1, dtype=torch.int32, device=device)
        counts = torch.tensor([count, count, invalid, layout.fingerprint], device=device)
        return FlowPlan(every[:-1].clone(), bags.int(), keys, every, every.clone(), counts)

    sorted_keys, lookups = keys.sort(stable=True)
    row_keys, sizes = torch.unique_consecutive(sorted_keys, return_counts=True)
    groups = layout.prefix_keys(row_keys) if flow == Flow.PREFIX else row_keys
    _, flow_sizes = torch.unique_consecutive(groups, return_counts=True)
    counts = torch.tensor([row_keys.numel(), flow_sizes.numel(), invalid, layout.fingerprint], device=device)
    padded_keys = keys.new_zeros(count)
    padded_keys[: row_keys.numel()] = row_keys
    return FlowPlan(lookups.int(), bags.int(), padded_keys, _starts(sizes, count), _starts(flow_sizes, count), counts)


def check_plan(layout: TTLayout, offsets: Tensor, plan: FlowPlan) -> FlowPlan:
    """The plan, once it is known to be one of this layout and these offsets, and as it was made.

    Raises:
        RuntimeError: if it is not.
    """
    count = plan.lookups.numel()
    for (name, tensor), size in zip(plan._asdict().items(), (count, count, count, count + 1, count + 1, 4)):
        if tensor.shape != (size,):
            raise RuntimeError(f"{name} must have shape [{size}], not {list(tensor.shape)}")
    rows, flows, _, fingerprint = plan.counts.tolist()
    batch_size = check_offsets(layout, count, offsets)
    fault = None
    if fingerprint != layout.fingerprint:
        fault = "it has the fingerprint of another layout"
    elif not (0 <= flows <= rows <= count) or (flows == 0) != (count == 0):
        fault = "counts are not those of its lookups"
    else:
        fault = _fault_of_plan(layout, offsets, plan, batch_size, rows, flows)
    if fault:
        raise RuntimeError(
            "the flow plan is not one of this layout and these offsets, or it has been changed since it was made: "
            f"{fault}. Make a plan of this batch with flow_plan"
        )
    return plan


def _fault_of_plan(
    layout: TTLayout, offsets: Tensor, plan: FlowPlan, batch_size: int, rows: int, flows: int
) -> str | None:
    """What is wrong with a plan whose counts are possible; each check relies on those before it."""
    count, device = plan.lookups.numel(), plan.lookups.device
    row_starts, flow_starts = plan.row_starts[: rows + 1].long(), plan.flow_starts[: flows + 1].long()
    for name, starts, end, of in (
        ("row_starts", row_starts, count, "lookups"),
        ("flow_starts", flow_starts, rows, "rows"),
    ):
        if int(starts[0]) != 0 or int(starts[-1]) != end or bool((starts.diff() <= 0).any()):
            return f"{name} do not lead from 0 to the number of {of}"
    bags = torch.arange(offsets.numel() - 1, device=device).repeat_interleave(offsets.diff(), output_size=count)
    if not torch.equal(plan.bags.long(), bags):
        return "bags are not those of the offsets"
    keys = plan.row_keys[:rows]
    numbers = keys >> layout.tables[0, TABLE_SHIFT].to(device)
    if bool(((numbers < 0) | (numbers >= layout.num_tables)).any()):
        return "row_keys are not those of rows that the tables have"
    described = layout.tables.to(device)[numbers]
    _, digits = layout.split_keys(keys)
    row_numbers = torch.zeros_like(keys)
    for k in range(MAX_CORES):
        row_numbers = row_numbers * described[:, P + k] + digits[:, k]
    if bool((row_numbers >= described[:, NUM_EMBEDDINGS]).any() or (layout.keys(numbers, row_numbers) != keys).any()):
        return "row_keys are not those of rows that the tables have"
    identity = torch.arange(count, device=device)
    lookups = plan.lookups.long()
    if bool((keys.diff() <= 0).any()) and not (flows == count and torch.equal(lookups, identity)):
        return "row_keys are out of order"
    row_of_place = _expand(row_starts, count)
    possible = (lookups >= 0) & (lookups < count)
    features = torch.div(bags[lookups.where(possible, 0)], max(batch_size, 1), rounding_mode="floor")
    own = possible & (layout.features.to(device)[features, 0] == numbers[row_of_place])
    if not bool(own.all()) or bool(((lookups.diff() <= 0) & (row_of_place.diff() == 0)).any()):
        return "lookups are not those of features that look up the table of their row"
    prefixes = layout.prefix_keys(keys)
    if bool(((prefixes.diff() != 0) & (_expand(flow_starts, rows).diff() == 0)).any()):
        return "rows of a flow differ in their prefix"
    return None if torch.equal(lookups.sort().values, identity) else "lookups repeat"


def synchronize(device: torch.device | None = None) -> None:
    """Nothing to do: here errors are raised at once."""


def release_memory() -> None:
    """Nothing to do: nothing is kept from call to call."""


def pooled_forward(
    weights: Tensor,
    layout: TTLayout,
    offsets: Tensor,
    plan: FlowPlan,
    per_sample_weights: Tensor | None = None,
    pooling_mode: PoolingMode = PoolingMode.SUM,
) -> Tensor:
    """Pooled rows ``[batch_size, total_dim]``; differentiable in ``weights`` and ``per_sample_weights``.

    All but the weights has the type that `flowtt_torchrec.precision.compute_dtype` gives for them.

    Args:
        weights: the cores of all tables, ``[num_parameters]``.
        layout: the tables and features.
        offsets: as for `flow_plan`.
        plan: the batch, grouped.
        per_sample_weights: factor of each lookup, ``[N]``.
        pooling_mode: how the rows of a bag become one.
    """
    weights = weights.to(compute_dtype(weights.dtype))
    distinct, flows = plan.counts[:2].tolist()
    row_starts, flow_starts = plan.row_starts[: distinct + 1].long(), plan.flow_starts[: flows + 1].long()
    row_of_lookup = torch.empty_like(plan.lookups, dtype=torch.int64)
    row_of_lookup[plan.lookups.long()] = _expand(row_starts, plan.lookups.numel())
    flow_of_row = _expand(flow_starts, distinct)
    row_tables, row_digits = layout.split_keys(plan.row_keys[:distinct])
    flow_tables, flow_digits = row_tables[flow_starts[:-1]], row_digits[flow_starts[:-1]]

    factors = _lookup_factors(weights, offsets, plan, per_sample_weights, pooling_mode)
    batch_size = (offsets.numel() - 1) // layout.num_features
    ends = offsets[batch_size * torch.arange(layout.num_features + 1, device=offsets.device)].tolist()
    table_rows: dict[int, tuple[Tensor, Tensor]] = {}  # rows of a table, and where each distinct row is among them
    outputs = []
    cores = layout.core_views(weights)
    for feature, table in enumerate(layout.feature_tables):
        if table not in table_rows:
            of_table, own_flows = row_tables == table, flow_tables == table
            prefixes = _prefix_products(cores[table], flow_digits[own_flows])
            shared = prefixes.index_select(0, (own_flows.cumsum(0) - 1)[flow_of_row[of_table]])
            rows = _rows(cores[table], shared, row_digits[of_table])
            table_rows[table] = rows, of_table.cumsum(0) - 1
        rows, place = table_rows[table]
        of_feature = slice(ends[feature], ends[feature + 1])
        contributions = rows.index_select(0, place[row_of_lookup[of_feature]]) * factors[of_feature, None]
        pooled = weights.new_zeros(batch_size, rows.shape[1])
        outputs.append(pooled.index_add(0, plan.bags[of_feature].long() - feature * batch_size, contributions))
    return torch.cat(outputs, dim=1)


def pooled_backward(
    grad_output: Tensor,
    weights: Tensor,
    layout: TTLayout,
    offsets: Tensor,
    plan: FlowPlan,
    per_sample_weights: Tensor | None = None,
    pooling_mode: PoolingMode = PoolingMode.SUM,
    per_sample_weights_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of `pooled_forward`, by autograd.

    Returns:
        The gradients of ``weights``, ``[num_parameters]`` and not rounded to their type, and of
        ``per_sample_weights``, ``[N]``, or ``[0]`` where not asked for.
    """
    with torch.enable_grad():
        weights = weights.detach().to(compute_dtype(weights.dtype)).requires_grad_()
        inputs = [weights]
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.detach().requires_grad_(per_sample_weights_grad)
        if per_sample_weights is not None and per_sample_weights_grad:
            inputs.append(per_sample_weights)
        output = pooled_forward(weights, layout, offsets, plan, per_sample_weights, pooling_mode)
        grads = torch.autograd.grad(output, inputs, grad_output)
    return grads[0], grads[1] if len(grads) > 1 else weights.new_empty(0)


@torch.no_grad()
def pooled_backward_update(
    grad_output: Tensor,
    weights: Tensor,
    momentum1: Tensor | None,
    momentum2: Tensor | None,
    layout: TTLayout,
    offsets: Tensor,
    plan: FlowPlan,
    optimizer: OptimizerSpec,
    per_sample_weights: Tensor | None = None,
    pooling_mode: PoolingMode = PoolingMode.SUM,
    per_sample_weights_grad: bool = False,
    steps: Tensor | None = None,
    rounding_seed: int = TO_NEAREST,
    learning_rate: Tensor | None = None,
) -> Tensor:
    """`pooled_backward`, then one step of a fused optimizer on ``weights`` and both momenta in place.

    Args:
        momentum1: the optimizer's state as `flowtt_torchrec.optimizers.init_state` makes it, none for SGD.
        momentum2: the average of squared gradients, for Adam only.
        optimizer: see `flowtt_torchrec.optimizers` for the formulas.
        steps: int64 ``[num_tables]`` on the CPU, number of this step of each table, from 1; needed by Adam.
        rounding_seed: how what is narrower than float32 is rounded in step 0, from which that of this step follows;
            see `flowtt_torchrec.precision.seed_of_step`.
        learning_rate: in the place of the optimizer's, float64 ``[]``; for compiled graphs.

    Returns:
        The gradient of ``per_sample_weights``, taken before the step, or ``[0]`` where not asked for.
    """
    flat_grad, grad_per_sample_weights = pooled_backward(
        grad_output, weights, layout, offsets, plan, per_sample_weights, pooling_mode, per_sample_weights_grad
    )
    rate = optimizer.learning_rate if learning_rate is None else learning_rate.to(flat_grad)
    row_tables, row_digits = layout.split_keys(plan.row_keys[: int(plan.counts[0])])
    cores, grads = layout.core_views(weights), layout.core_views(flat_grad)
    elements = layout.core_views(torch.arange(weights.numel(), device=weights.device))
    views_of_first = layout.slice_views if optimizer.kind == ROWWISE_ADAGRAD else layout.core_views
    first = [] if momentum1 is None else views_of_first(momentum1)
    second = [] if momentum2 is None else layout.core_views(momentum2)
    for table, spec in enumerate(layout.specs):
        step = 0 if steps is None else int(steps[table])
        table_seed = seed_of_step(rounding_seed, step)
        for k in range(spec.num_cores):
            touched = row_digits[row_tables == table, k].unique()
            core, grad = cores[table][k], grads[table][k][touched]
            slices = core[touched].to(grad.dtype)
            if optimizer.kind == ADAM:
                m, v = first[table][k], second[table][k]
                m[touched] = optimizer.beta1 * m[touched] + (1 - optimizer.beta1) * grad
                v[touched] = optimizer.beta2 * v[touched] + (1 - optimizer.beta2) * grad.square()
                root = divisor(v[touched] / (1 - optimizer.beta2**step), optimizer.eps)
                change = m[touched] / (1 - optimizer.beta1**step) / root + optimizer.weight_decay * slices
            elif optimizer.kind == SGD:
                change = grad + optimizer.weight_decay * slices
            else:
                grad = grad + optimizer.weight_decay * slices
                square = grad.square()
                if optimizer.kind == ROWWISE_ADAGRAD:
                    square = square.mean(dim=(1, 2, 3))
                m = first[table][k]
                m[touched] += square
                root = divisor(m[touched], optimizer.eps)
                change = grad / (root[:, None, None, None] if optimizer.kind == ROWWISE_ADAGRAD else root)
            slices = slices - rate * change
            core[touched] = round_weights(slices, core.dtype, table_seed, elements[table][k][touched])
    return grad_per_sample_weights


def check_offsets(layout: TTLayout, count: int, offsets: Tensor) -> int:
    """Returns the batch size."""
    bags, features = offsets.numel() - 1, layout.num_features
    if bags < 0 or bags % features:
        raise RuntimeError(
            f"offsets has {offsets.numel()} entries; {features} features need {features} * batch_size + 1"
        )
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != count:
        raise RuntimeError(
            f"offsets must start at 0 and end at the number of indices, {count}, but go from {first} to {last}"
        )
    falls = (offsets.diff() < 0).nonzero()
    if falls.numel():
        at = int(falls[0])
        raise RuntimeError(
            f"offsets must not decrease, but offsets[{at}] = {int(offsets[at])} and "
            f"offsets[{at + 1}] = {int(offsets[at + 1])}"
        )
    return bags // features


def check_rows(
    layout: TTLayout, indices: Tensor, bags: Tensor, batch_size: int, mode: BoundsCheckMode
) -> tuple[Tensor, Tensor, int]:
    """Returns the table and row of each lookup, rows out of range replaced by 0, and how many of those there are."""
    features = torch.div(bags, max(batch_size, 1), rounding_mode="floor")
    tables = layout.features.to(indices.device)[features, 0]
    limits = layout.tables.to(indices.device)[tables, NUM_EMBEDDINGS]
    rows = indices.long()
    out_of_range = (rows < 0) | (rows >= limits)
    invalid = int(out_of_range.sum())
    if invalid and mode != BoundsCheckMode.IGNORE:
        at = int(out_of_range.nonzero()[0])
        message = (
            f"index {int(rows[at])} at position {at} (feature {int(features[at])}, table "
            f"{layout.names[int(tables[at])]!r}) is out of range; allowed: 0 to {int(limits[at]) - 1}"
        )
        if mode == BoundsCheckMode.FATAL:
            raise IndexError(message)
        warnings.warn(f"{message}. In this call {invalid} such indices are looked up as row 0", stacklevel=2)
    return tables, rows.masked_fill(out_of_range, 0), invalid


def _starts(sizes: Tensor, count: int) -> Tensor:
    """Where each group starts, then the end, padded to ``[count + 1]``."""
    starts = torch.zeros(count + 1, dtype=torch.int32, device=sizes.device)
    starts[1 : sizes.numel() + 1] = sizes.cumsum(0)
    return starts


def _expand(starts: Tensor, count: int) -> Tensor:
    """The group of each of ``count`` members, from where groups start."""
    groups = torch.arange(starts.numel() - 1, device=starts.device)
    return groups.repeat_interleave(starts.diff(), output_size=count)


def _lookup_factors(
    weights: Tensor, offsets: Tensor, plan: FlowPlan, per_sample_weights: Tensor | None, pooling_mode: PoolingMode
) -> Tensor:
    """What each lookup's row is multiplied by before the rows of a bag are summed, ``[N]``."""
    if per_sample_weights is None:
        factors = torch.ones(plan.bags.numel(), dtype=weights.dtype, device=weights.device)
    else:
        factors = per_sample_weights
    if pooling_mode == PoolingMode.MEAN:
        factors = factors / offsets.diff()[plan.bags.long()]
    return factors


def _prefix_products(cores: list[Tensor], digits: Tensor) -> Tensor:
    """``G_1[i_1] ... G_{d-1}[i_{d-1}]`` for digits ``[n, MAX_CORES]``, as ``[n, q_1 ... q_{d-1}, r_{d-1}]``."""
    product = cores[0].index_select(0, digits[:, 0]).flatten(1, 2)
    for k, core in enumerate(cores[1:-1], start=1):
        slices = core.index_select(0, digits[:, k])
        product = torch.einsum("nar,nrqs->naqs", product, slices).flatten(1, 2)
    return product


def _rows(cores: list[Tensor], prefixes: Tensor, digits: Tensor) -> Tensor:
    """Rows ``[n, embedding_dim]`` from the prefix product of each, and its last digit."""
    last = cores[-1].squeeze(3).index_select(0, digits[:, len(cores) - 1])
    return torch.einsum("nar,nrq->naq", prefixes, last).flatten(1)
