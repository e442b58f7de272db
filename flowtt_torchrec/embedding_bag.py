"""Modules: `TTEmbeddingBag`, called as ``nn.EmbeddingBag``, and `BatchedTTEmbeddingBags`, many tables in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowtt_torchrec import ops
from flowtt_torchrec.cores import default_std, from_dense, init_cores
from flowtt_torchrec.deferred import deferred_lookup
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.materialised import MaterialisedRows
from flowtt_torchrec.optimizers import (
    STEP,
    OptimizerSpec,
    apply_gradient,
    init_state,
    split_state,
    state_names,
    touched_slices,
)
from flowtt_torchrec.plan import BoundsCheckMode
from flowtt_torchrec.precision import check_weight_dtype, compute_dtype
from flowtt_torchrec.spec import TTSpec
from flowtt_torchrec.whole_numbers import whole_number


class _FlatCores(nn.Module):
    """Cores of a group of tables in one flat parameter; in a state dict every core is a tensor of its own."""

    def __init__(
        self,
        layout: TTLayout,
        optimizer: OptimizerSpec | None,
        device: torch.device | str | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        check_weight_dtype(dtype)
        self.layout = layout
        self.optimizer = optimizer
        self.weights = nn.Parameter(torch.empty(layout.num_parameters, device=device, dtype=dtype))
        self.materialised: MaterialisedRows | None = None
        self._state_names = () if optimizer is None else state_names(optimizer.kind, dtype)
        if optimizer is not None:
            # Not persistent as buffers: _save_to_state_dict writes them core by core.
            for name, state in init_state(layout, optimizer.kind, dtype=dtype, device=self.weights.device).items():
                if name == STEP:  # no buffer: stays on the CPU, where it is read
                    self.step = state
                else:
                    self.register_buffer(name, state, persistent=False)

    def _core_key(self, table: str, core: int) -> str:
        """Name of a core in the state dict, under the module's own prefix."""
        return f"{table}.tt_core{core}"

    def _optimizer_state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._state_names}

    def materialise_rows(self, max_bytes: int, strategy: str = "auto") -> None:
        """Lets lookups without gradients keep rows of tables in memory while the weights do not change.

        ``materialised`` then is the `MaterialisedRows` that does it, and tells which tables' rows are kept.

        Args:
            max_bytes: the most that they may take; 0 to keep none any more.
            strategy: as for `MaterialisedRows`.
        """
        self.materialised = MaterialisedRows(max_bytes, strategy) if max_bytes else None

    def _rows_without_gradient(self, per_sample_weights: Tensor | None) -> MaterialisedRows | None:
        """What keeps rows, if this lookup may use it."""
        inputs = (self.weights, per_sample_weights)
        wants_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        # A compiled graph would take kept rows for constants.
        if wants_gradient or torch.compiler.is_compiling() or self.weights.is_inference():
            return None
        return self.materialised

    def split_weights(self) -> dict[str, list[Tensor]]:
        """The cores ``[p_k, r_{k-1}, q_k, r_k]`` of each table: detached views that share the parameter's memory."""
        return dict(zip(self.layout.names, self.layout.core_views(self.weights.detach())))

    def _pieces(self, weights: Tensor) -> dict[str, dict[str, tuple[str, Tensor]]]:
        """For each flat tensor, its pieces in order: key in the state dict, without prefix, to table and view."""
        pieces: dict[str, dict[str, tuple[str, Tensor]]] = {"weights": {}}
        for table, cores in zip(self.layout.names, self.layout.core_views(weights)):
            for k, core in enumerate(cores):
                pieces["weights"][self._core_key(table, k)] = table, core
        if self.optimizer is not None:
            split = split_state(self.layout, self.optimizer.kind, self._optimizer_state())
            for name in self._state_names:
                pieces[name] = {
                    f"{self._core_key(table, k)}.{name}": (table, core_state[name])
                    for table, core_states in split.items()
                    for k, core_state in enumerate(core_states)
                }
        return pieces

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for pieces in self._pieces(self.weights if keep_vars else self.weights.detach()).values():
            for key, (_, piece) in pieces.items():
                destination[prefix + key] = piece

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        assign = local_metadata.get("assign_to_params_buffers", False)
        known: set[str] = set()
        for name, pieces in self._pieces(self.weights.detach()).items():
            known.update(prefix + key for key in pieces)
            found = {key: state_dict[prefix + key].detach() for key in pieces if prefix + key in state_dict}
            missing = [prefix + key for key in pieces if key not in found]
            errors = []
            for key, tensor in found.items():
                table, piece = pieces[key]
                if tensor.shape != piece.shape:
                    errors.append(
                        f"table {table!r}: {prefix + key} has shape {list(tensor.shape)} in the state dict, but the "
                        f"table's TTSpec needs {list(piece.shape)}"
                    )
                elif piece.is_meta and not assign:
                    errors.append(
                        f"table {table!r}: cannot load {prefix + key} into a module on the meta device; call to_empty "
                        "first, or load with assign=True"
                    )
            if strict:
                missing_keys.extend(missing)
            error_msgs.extend(errors)
            assigned = assign and name != STEP
            if errors or (missing and assigned):  # a flat tensor is assigned whole or not at all
                continue
            if assigned:
                flat = torch.cat([found[key].flatten() for key in pieces])
                setattr(self, name, nn.Parameter(flat, self.weights.requires_grad) if name == "weights" else flat)
                continue
            for key, tensor in found.items():
                pieces[key][1].copy_(tensor)
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in known)


class BatchedTTEmbeddingBags(_FlatCores):
    """Many tensor-train tables of any shapes, looked up in one op call.

    Args:
        specs: shape of each table, by name.
        feature_table_map: number of the table that each feature looks up, in the order of the output's columns; one
            feature a table if not given.
        pooling: ``"sum"`` or ``"mean"``.
        optimizer: a fused optimizer, stepped inside backward; without one, ``weights`` gets a dense gradient.
        bounds_check_mode: what happens to a row number that its table does not have.
        device: where the weights live; on ``"meta"`` they are not initialised.
        dtype: of the weights: float32, float64, bfloat16 or float16. All that is computed, and the optimizer's state,
            is float32, with float64 weights float64.
        output_dtype: of the output, a floating-point type; if not given, that of what is computed.
        seed: changes the initial weights; a table's also depend on its name, and on nothing else. And the bits by which
            stochastic rounding of updated bfloat16 or float16 weights goes.
        keep_forward_weights: with a fused optimizer, whether backward may follow another step of these tables, as in
            semi-synchronous training; otherwise that is an error. Every forward keeps a copy of the cores then, at
            which its gradient is taken: the step is that of any optimizer that is given a late gradient.

    Attributes:
        weights: one flat parameter with the cores of all tables; `split_weights` has them one by one.
        layout: where each core lies in it.
        optimizer: the fused optimizer with its present learning rate, or none.

    State dict:
        ``<table>.tt_core<k>`` for every core, ``k`` from 0, and with a fused optimizer its state as
        ``<table>.tt_core<k>.momentum1``; for Adam also ``exp_avg_sq`` and ``step``, the number of steps made.

    Raises:
        ValueError: as `TTLayout`, or for an unknown pooling.
    """

    def __init__(
        self,
        specs: Mapping[str, TTSpec],
        *,
        feature_table_map: Sequence[int] | None = None,
        pooling: str = "sum",
        optimizer: OptimizerSpec | None = None,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype | None = None,
        seed: int = 0,
        keep_forward_weights: bool = False,
    ) -> None:
        super().__init__(TTLayout(list(specs.values()), list(specs), feature_table_map), optimizer, device, dtype)
        if pooling not in ("sum", "mean"):
            raise ValueError(f"unknown pooling {pooling!r}; known: sum, mean")
        self.pooling = pooling
        self.output_dtype = compute_dtype(dtype) if output_dtype is None else output_dtype
        self.bounds_check_mode = bounds_check_mode
        self.seed = whole_number("seed", seed)
        self.keep_forward_weights = keep_forward_weights
        # A new tensor for every value: a compiled graph keeps the one of its forward until backward.
        rate = None if optimizer is None else torch.tensor(optimizer.learning_rate, dtype=torch.float64, device="cpu")
        self._learning_rate = rate
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights anew, with the variance of TorchRec's tables, and zeroes the optimizer's state."""
        if self.weights.is_meta:
            return
        for (name, views), spec in zip(self.split_weights().items(), self.layout.specs):
            cores = init_cores(spec, name, default_std(spec.num_embeddings), seed=self.seed, dtype=self.weights.dtype)
            for view, core in zip(views, cores):
                view.copy_(core)
        for state in self._optimizer_state().values():
            state.zero_()

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pooled rows of all features, side by side.

        Args:
            indices: int32 or int64 ``[N]``, row numbers, feature by feature.
            offsets: int32 or int64 ``[num_features * batch_size + 1]``, first lookup of each bag, then ``N``.
            per_sample_weights: factor of each lookup, ``[N]``, float64 if the weights are, else float32.

        Returns:
            ``[batch_size, layout.total_dim]`` of ``output_dtype``.
        """
        return self._lookup(indices, offsets, per_sample_weights).to(self.output_dtype)

    def _lookup(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        rows = self._rows_without_gradient(per_sample_weights)
        if rows is not None or self.optimizer is None:
            return (ops if rows is None else rows).lookup(
                self.weights,
                self.layout,
                indices,
                offsets,
                per_sample_weights=per_sample_weights,
                pooling=self.pooling,
                bounds_check_mode=self.bounds_check_mode,
            )
        if self.keep_forward_weights and self.weights.requires_grad and torch.is_grad_enabled():
            return deferred_lookup(
                self.weights,
                self.layout,
                indices,
                offsets,
                read=self.weights.detach().clone,
                leave=self._step,
                with_row_keys=self.optimizer.needs_touched,
                per_sample_weights=per_sample_weights,
                pooling=self.pooling,
                bounds_check_mode=self.bounds_check_mode,
            )
        return ops.fused_lookup(
            self.weights,
            self.layout,
            indices,
            offsets,
            optimizer=self.optimizer,
            state=self._optimizer_state(),
            per_sample_weights=per_sample_weights,
            pooling=self.pooling,
            bounds_check_mode=self.bounds_check_mode,
            seed=self.seed,
            learning_rate=self._learning_rate,
        )

    @torch.no_grad()
    def _step(self, grad: Tensor, row_keys: Tensor | None) -> None:
        self.apply_gradient(grad, None if row_keys is None else touched_slices(self.layout, row_keys))

    def split_optimizer_state(self) -> dict[str, list[dict[str, Tensor]]]:
        """The fused optimizer's state by table and core, e.g. ``{"momentum1": …}``: views that share its memory.

        A view is shaped as the core, or ``[p_k]`` for row-wise Adagrad; SGD has none. Adam's ``step`` is ``[]``.
        """
        if self.optimizer is None:
            return {spec_name: [{} for _ in spec.p] for spec_name, spec in zip(self.layout.names, self.layout.specs)}
        return split_state(self.layout, self.optimizer.kind, self._optimizer_state())

    def apply_gradient(self, grad: Tensor, touched: Tensor | None = None) -> None:
        """Steps the fused optimizer from a gradient of `weights` that was summed elsewhere.

        Args:
            grad: ``[layout.num_parameters]``, not rounded to the weights' type.
            touched: bool ``[layout.num_slices]``, slices that were looked up; needed with weight decay, and by Adam.
        """
        if self.optimizer is None:
            raise RuntimeError("no fused optimizer; give the gradient to the torch optimizer of these tables")
        state = self._optimizer_state()
        apply_gradient(self.layout, self.optimizer, self.weights.detach(), state, grad, touched, self.seed)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the fused optimizer's learning rate for the forward passes from now on, and their backward."""
        if self.optimizer is None:
            raise RuntimeError(
                "no fused optimizer; set the learning rate in the torch optimizer that steps these tables"
            )
        self.optimizer = dataclasses.replace(self.optimizer, learning_rate=learning_rate)
        self._learning_rate = torch.tensor(learning_rate, dtype=torch.float64, device="cpu")

    def extra_repr(self) -> str:
        layout = self.layout
        return (
            f"{layout.num_tables} tables, {layout.num_features} features, {layout.num_parameters:,} parameters, "
            f"pooling={self.pooling!r}, optimizer={self.optimizer}, dtype={self.weights.dtype}"
        )


class TTEmbeddingBag(_FlatCores):
    """A tensor-train table in the place of ``nn.EmbeddingBag``: the same calls give the same kind of output.

    Not supported: ``mode="max"``, ``max_norm``, ``scale_grad_by_freq`` and ``sparse``. A difference: ``input`` and
    ``offsets`` may be of different integer types, and ``per_sample_weights`` of any floating-point type.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        max_norm: ``None``, as all that is supported; so for the next three. They are there for code that names them.
        norm_type: ``2.0``.
        scale_grad_by_freq: ``False``.
        mode: ``"sum"`` or ``"mean"``.
        sparse: ``False``.
        include_last_offset: whether ``offsets`` ends with the number of indices.
        padding_idx: lookups of this row count for nothing, neither in a mean nor in a gradient.
        spec: shape of the tensor train; ``TTSpec.suggest(num_embeddings, embedding_dim, rank)`` if not given.
        rank: TT rank where ``spec`` is not given.
        bounds_check_mode: what happens to a row number that the table does not have.
        device: where the weights live; on ``"meta"`` they are not initialised.
        dtype: of weights and output: float32, float64, bfloat16 or float16; torch's default type if not given. Sums
            are float32 or float64.

    Attributes:
        weights: one flat parameter with all cores; the state dict has them as ``tt_core<k>``, ``k`` from 0.

    Raises:
        NotImplementedError: for what is not supported.
        ValueError: if the spec is for another size, or for an unknown mode or a padding_idx out of range.

    Example:
        >>> bag = TTEmbeddingBag(10_000_000, 64, rank=32, mode="sum")
        >>> bag(torch.tensor([[1, 2], [3, 9_999_999]])).shape
        torch.Size([2, 64])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        spec: TTSpec | None = None,
        rank: int = 32,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _refuse("max_norm", max_norm, None, "rows are products of cores, which cannot be renormalised one by one")
        _refuse("norm_type", norm_type, 2.0, "it belongs to max_norm")
        _refuse("scale_grad_by_freq", scale_grad_by_freq, False, "gradients are those of the sum or the mean")
        _refuse("sparse", sparse, False, "gradients of cores are small and dense")
        num_embeddings = whole_number("num_embeddings", num_embeddings)
        embedding_dim = whole_number("embedding_dim", embedding_dim)
        spec = TTSpec.suggest(num_embeddings, embedding_dim, rank) if spec is None else spec
        spec.check_table("TTEmbeddingBag", num_embeddings, embedding_dim)
        if mode not in ("sum", "mean"):
            raise ValueError(f"unknown mode {mode!r}; known: sum, mean")
        padding_idx = None if padding_idx is None else whole_number("padding_idx", padding_idx)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx {padding_idx} is outside the table's {num_embeddings} rows")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        super().__init__(TTLayout([spec], ["TTEmbeddingBag"]), None, device, dtype)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.spec = spec
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.bounds_check_mode = bounds_check_mode
        self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, spec: TTSpec | None = None, *, rank: int = 32, freeze: bool = True, **kwargs: Any
    ) -> TTEmbeddingBag:
        """The tensor train closest to a dense table, by TT-SVD.

        Args:
            embeddings: the table, ``[num_embeddings, embedding_dim]``.
            spec: shape of the tensor train; ``TTSpec.suggest`` with ``rank`` if not given.
            rank: TT rank where ``spec`` is not given.
            freeze: whether the weights stay as they are in training.
            **kwargs: passed on to the constructor.
        """
        rows, columns = embeddings.shape
        spec = TTSpec.suggest(rows, columns, rank) if spec is None else spec
        cores = from_dense(embeddings, spec)
        bag = cls(rows, columns, spec=spec, device="meta", dtype=embeddings.dtype, **kwargs)
        flat = torch.cat([core.flatten() for core in cores])
        bag.weights = nn.Parameter(flat, requires_grad=not freeze)
        return bag

    def _core_key(self, table: str, core: int) -> str:
        return f"tt_core{core}"

    @property
    def cores(self) -> list[Tensor]:
        """The cores ``[p_k, r_{k-1}, q_k, r_k]``: detached views that share the parameter's memory."""
        return self.layout.core_views(self.weights.detach())[0]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights anew from torch's generator, rows with the variance of TorchRec's tables."""
        if self.weights.is_meta:
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        std = default_std(self.num_embeddings)
        for view, core in zip(self.cores, init_cores(self.spec, "", std, seed=seed, dtype=self.weights.dtype)):
            view.copy_(core)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pooled rows, ``[bags, embedding_dim]``.

        Args:
            input: int32 or int64 row numbers: ``[bags, n]``, bags of equal size, or ``[N]`` with ``offsets``.
            offsets: int32 or int64, where each bag starts in a 1-D ``input``; must be none for a 2-D one.
            per_sample_weights: factor of each lookup, shaped as ``input``; only with ``mode="sum"``.
        """
        if per_sample_weights is not None and per_sample_weights.shape != input.shape:
            raise ValueError(
                f"per_sample_weights must have the shape of input, {list(input.shape)}, "
                f"not {list(per_sample_weights.shape)}"
            )
        if per_sample_weights is not None and self.mode != "sum":
            raise NotImplementedError(
                f"per_sample_weights is only supported for mode='sum', as in nn.EmbeddingBag (got mode={self.mode!r})"
            )
        offsets = self._bag_offsets(input, offsets)
        input = input.flatten()
        dtype = compute_dtype(self.weights.dtype)
        weights = None if per_sample_weights is None else per_sample_weights.flatten().to(dtype)
        return self._pool(input, offsets, weights).to(self.weights.dtype)

    def _pool(self, input: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        if self.padding_idx is None:
            return self._lookup(input, offsets, weights, self.mode)
        counted = input != self.padding_idx
        # Not a product: a weight that is not a number must not matter where it does not count.
        factors = counted.to(compute_dtype(self.weights.dtype)) if weights is None else weights.where(counted, 0)
        output = self._lookup(input, offsets, factors, "sum")
        if self.mode == "sum":
            return output
        ends = nn.functional.pad(counted.cumsum(0), (1, 0))[offsets.long()]  # int64: a float32 would stop at 2^24
        return output / ends.diff().clamp(min=1)[:, None]

    def _lookup(self, indices: Tensor, offsets: Tensor, weights: Tensor | None, pooling: str) -> Tensor:
        rows = self._rows_without_gradient(weights)
        return (ops if rows is None else rows).lookup(
            self.weights,
            self.layout,
            indices,
            offsets,
            per_sample_weights=weights,
            pooling=pooling,
            bounds_check_mode=self.bounds_check_mode,
        )

    def _bag_offsets(self, input: Tensor, offsets: Tensor | None) -> Tensor:
        """Where bags start, and the number of indices at the end."""
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets must be None for a 2-D input, whose rows are the bags")
            bags, size = input.shape
            return torch.arange(bags + 1, dtype=input.dtype, device=input.device) * size
        if input.dim() != 1:
            raise ValueError(f"input must have 1 or 2 dimensions, not {input.dim()}")
        if offsets is None or offsets.dim() != 1:
            raise ValueError("a 1-D input needs 1-D offsets, where each bag starts")
        if offsets.numel() == 0 and (self.include_last_offset or input.numel() > 0):
            raise ValueError(
                f"offsets is empty, so none of the {input.numel()} indices is in a bag; give the place in input where "
                f"each bag starts{', and at the end the number of indices' if self.include_last_offset else ''}"
            )
        if self.include_last_offset:
            return offsets
        return torch.cat([offsets, offsets.new_full((1,), input.numel())])

    def extra_repr(self) -> str:
        spec = self.spec
        text = f"{self.num_embeddings}, {self.embedding_dim}, p={spec.p}, q={spec.q}, ranks={spec.ranks}"
        text += f", mode={self.mode!r}"
        if self.include_last_offset:
            text += ", include_last_offset=True"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        return text


def _refuse(keyword: str, value: object, default: object, why: str) -> None:
    """Raises ``NotImplementedError`` for a keyword of ``nn.EmbeddingBag`` that is not at its default."""
    if value != default:
        raise NotImplementedError(f"TTEmbeddingBag has no {keyword}={value!r}: {why}; leave it at {default!r}")
