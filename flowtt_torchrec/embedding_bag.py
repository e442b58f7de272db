"""Modules: `TTEmbeddingBag`, called as ``nn.EmbeddingBag``, and `BatchedTTEmbeddingBags`, many tables in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowtt_torchrec import ops
from flowtt_torchrec.cores import core_name, default_std, from_dense, init_cores
from flowtt_torchrec.deferred import deferred_lookup
from flowtt_torchrec.flat_cores import FlatCores, OptimizerState
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import STEP, OptimizerSpec, apply_gradient, leave_out, touched_slices
from flowtt_torchrec.plan import BoundsCheckMode
from flowtt_torchrec.precision import compute_dtype
from flowtt_torchrec.spec import TTSpec
from flowtt_torchrec.whole_numbers import whole_number

_STATE = "optimizer_state"  # the module that has the state of a fused optimizer


class BatchedTTEmbeddingBags(FlatCores):
    """Many tensor-train tables of any shapes, looked up in one op call.

    Args:
        specs: shape of each table, by name.
        feature_table_map: number of the table that each feature looks up, in the order of the output's columns; one
            feature a table if not given.
        pooling: ``"sum"`` or ``"mean"``.
        optimizer: a fused optimizer, stepped inside backward; without one, the cores get dense gradients. It steps
            parameters that require a gradient; what ``functional_call`` puts in their places gets gradients instead.
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
        weights: the flat buffer that all cores lie in, without gradient; see `FlatCores.weights`.
        layout: where each core lies in it.
        optimizer: the fused optimizer with its present learning rate, or none.
        optimizer_state: its state, an `OptimizerState`, or none.

    Parameters and state dict:
        ``<table>.tt_core<k>`` for every core, ``k`` from 0. With a fused optimizer the state dict also has its state as
        ``optimizer_state.<table>.tt_core<k>_momentum1``; for Adam ``…_exp_avg_sq`` too. Adam, and cores that are
        rounded, have ``optimizer_state.<table>.step``, the number of steps made. State dicts that call the state
        ``<table>.tt_core<k>.momentum1`` load as well.

    Raises:
        ValueError: as `TTLayout`, for an unknown pooling, or for a table's name that no module can have.
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
        super().__init__(TTLayout(list(specs.values()), list(specs), feature_table_map))
        if pooling not in ("sum", "mean"):
            raise ValueError(f"unknown pooling {pooling!r}; known: sum, mean")
        for name in specs:
            if not name or "." in name or name == _STATE:
                raise ValueError(
                    f"a table cannot be called {name!r}: its cores are parameters of a module of that name"
                )
        self.pooling = pooling
        self.bounds_check_mode = bounds_check_mode
        self.seed = whole_number("seed", seed)
        self.keep_forward_weights = keep_forward_weights
        self._output_dtype = output_dtype
        self._optimizer = optimizer
        # A new tensor for every value: a compiled graph keeps the one of its forward until backward.
        rate = None if optimizer is None else torch.tensor(optimizer.learning_rate, dtype=torch.float64, device="cpu")
        self._learning_rate = rate
        self._trained = torch.empty(0, device="cpu", requires_grad=True)  # brings backward to a fused optimizer
        # Not by add_module: a table may be called as an attribute is.
        self._modules.update({name: nn.Module() for name in specs})
        self._add_cores(device, dtype)
        self.optimizer_state = None
        if optimizer is not None:
            self.optimizer_state = OptimizerState(self.layout, optimizer.kind, dtype, self.weights.device)
        self.reset_parameters()

    def _holders(self) -> list[nn.Module]:
        modules = self._modules
        return [modules[name] for name in self.layout.names]  # type: ignore[misc]

    def table(self, name: str) -> nn.Module:
        """The module that has a table's cores as its parameters ``tt_core<k>``."""
        return self._modules[name]  # type: ignore[return-value]

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """The fused optimizer with its present learning rate, or none."""
        return self._optimizer

    @property
    def output_dtype(self) -> torch.dtype:
        """Type of the output."""
        return compute_dtype(self.current_cores()[0].dtype) if self._output_dtype is None else self._output_dtype

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights anew, with the variance of TorchRec's tables, and zeroes the optimizer's state."""
        for (name, cores), spec in zip(self.split_weights().items(), self.layout.specs):
            if cores[0].is_meta:
                return
            drawn = init_cores(spec, name, default_std(spec.num_embeddings), seed=self.seed, dtype=cores[0].dtype)
            for core, values in zip(cores, drawn):
                core.copy_(values)
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
        output = self._lookup(indices, offsets, per_sample_weights)
        return output if self._output_dtype is None else output.to(self._output_dtype)

    def _lookup(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        cores = self.current_cores()
        flat = self._flat_behind(cores) if self._optimizer is None else self.flat_to_step(cores)
        options: dict[str, Any] = {
            "per_sample_weights": per_sample_weights,
            "pooling": self.pooling,
            "bounds_check_mode": self.bounds_check_mode,
        }
        rows = self._rows_without_gradient(flat, cores, per_sample_weights)
        if rows is not None:
            assert flat is not None
            return rows.lookup(flat, self.layout, indices, offsets, **options)
        if flat is None or self._optimizer is None:
            return ops.lookup(self._differentiable(flat, cores), self.layout, indices, offsets, **options)
        trained = [core.requires_grad for core in cores]
        if not torch.is_grad_enabled() or not any(trained):
            return ops.lookup(flat, self.layout, indices, offsets, **options)
        if self.keep_forward_weights or not all(trained):
            weights = flat.clone() if self.keep_forward_weights else flat
            return deferred_lookup(
                self._trained,
                self.layout,
                indices,
                offsets,
                read=lambda: weights,
                leave=lambda grad, row_keys: self._step(grad, row_keys, trained),
                with_row_keys=self._optimizer.needs_touched,
                **options,
            )
        return ops.fused_lookup(
            flat,
            self.layout,
            indices,
            offsets,
            optimizer=self._optimizer,
            state=self._optimizer_state(),
            seed=self.seed,
            learning_rate=self._learning_rate,
            trained=self._trained,
            **options,
        )

    def flat_to_step(self, cores: Sequence[Tensor]) -> Tensor | None:
        """The memory of the parameters; none if other tensors are in their places, which nobody can step.

        Args:
            cores: of `current_cores`.

        Raises:
            RuntimeError: for parameters of several types or devices.
        """
        flat = self._flat_behind(cores)
        if flat is None and not torch.compiler.is_exporting() and all(isinstance(c, nn.Parameter) for c in cores):
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "the cores are other parameters than before: call relink() first, or the module itself"
                )
            self.relink()
            flat = self._flat_behind(cores)
            if flat is None:
                raise RuntimeError(
                    "the cores have been given several types or devices, and a fused optimizer steps all in one call; "
                    "convert or move the whole module"
                )
        if flat is not None:
            self._note_changes(flat, cores)
        return flat

    @torch.no_grad()
    def _step(self, grad: Tensor, row_keys: Tensor | None, trained: Sequence[bool]) -> None:
        touched = None if row_keys is None else touched_slices(self.layout, row_keys)
        leave_out(self.layout, trained, grad, touched)
        self.apply_gradient(grad, touched)

    def _optimizer_state(self) -> dict[str, Tensor]:
        return {} if self.optimizer_state is None else self.optimizer_state.flat

    def split_optimizer_state(self) -> dict[str, list[dict[str, Tensor]]]:
        """The fused optimizer's state by table and core, e.g. ``{"momentum1": …}``: views that share its memory.

        A view is shaped as the core, or ``[p_k]`` for row-wise Adagrad; SGD has none. Adam's ``step`` is ``[]``.
        """
        if self.optimizer_state is None:
            return {spec_name: [{} for _ in spec.p] for spec_name, spec in zip(self.layout.names, self.layout.specs)}
        return self.optimizer_state.split()

    def apply_gradient(self, grad: Tensor, touched: Tensor | None = None) -> None:
        """Steps the fused optimizer from a gradient of `weights` that was summed elsewhere.

        Args:
            grad: ``[layout.num_parameters]``, not rounded to the weights' type.
            touched: bool ``[layout.num_slices]``, slices that were looked up; needed with weight decay, and by Adam.
        """
        if self._optimizer is None:
            raise RuntimeError("no fused optimizer; give the gradient to the torch optimizer of these tables")
        flat = self.flat_to_step(self.current_cores())
        if flat is None:
            raise RuntimeError("a fused optimizer steps parameters, and others are in the places of the cores")
        apply_gradient(self.layout, self._optimizer, flat, self._optimizer_state(), grad, touched, self.seed)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the fused optimizer's learning rate for the forward passes from now on, and their backward."""
        if self._optimizer is None:
            raise RuntimeError(
                "no fused optimizer; set the learning rate in the torch optimizer that steps these tables"
            )
        if learning_rate == self._optimizer.learning_rate:
            return
        self._optimizer = dataclasses.replace(self._optimizer, learning_rate=learning_rate)
        self._learning_rate = torch.tensor(learning_rate, dtype=torch.float64, device="cpu")

    def relink(self) -> None:
        """As `FlatCores.relink`, the optimizer's state included."""
        super().relink()
        if self.optimizer_state is not None:
            self.optimizer_state.relink()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BatchedTTEmbeddingBags:
        super()._apply(fn, recurse)
        if self.optimizer_state is not None:
            self.optimizer_state.follow(self.current_cores()[0].dtype)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes the optimizer's state also by the names that it had beside the cores."""
        for table, spec in zip(self.layout.names, self.layout.specs):
            for k in range(spec.num_cores):
                old = f"{prefix}{table}.{core_name(k)}."
                for name in self._optimizer_state():
                    if old + name in state_dict:
                        piece = STEP if name == STEP else f"{core_name(k)}_{name}"
                        state_dict[f"{prefix}{_STATE}.{table}.{piece}"] = state_dict.pop(old + name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        layout = self.layout
        return (
            f"{layout.num_tables} tables, {layout.num_features} features, {layout.num_parameters:,} parameters, "
            f"pooling={self.pooling!r}, optimizer={self.optimizer}, dtype={self.current_cores()[0].dtype}"
        )


class TTEmbeddingBag(FlatCores):
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
        tt_core0, tt_core1, ...: the cores ``[p_k, r_{k-1}, q_k, r_k]``, its parameters.
        weights: the flat buffer that they lie in, without gradient; see `FlatCores.weights`.

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
        super().__init__(TTLayout([spec], ["TTEmbeddingBag"]))
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.spec = spec
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.bounds_check_mode = bounds_check_mode
        self._add_cores(device, dtype)
        self.reset_parameters()

    def _holders(self) -> list[nn.Module]:
        return [self]

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
        bag.load_state_dict({core_name(k): core for k, core in enumerate(cores)}, assign=True)
        return bag.requires_grad_(not freeze)

    @property
    def cores(self) -> list[Tensor]:
        """The cores ``[p_k, r_{k-1}, q_k, r_k]``: detached views that share the parameters' memory."""
        return [core.detach() for core in self.current_cores()]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights anew from torch's generator, rows with the variance of TorchRec's tables."""
        first = self.cores[0]
        if first.is_meta:
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        std = default_std(self.num_embeddings)
        for view, core in zip(self.cores, init_cores(self.spec, "", std, seed=seed, dtype=first.dtype)):
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
        cores = self.current_cores()
        dtype = cores[0].dtype
        factors = None if per_sample_weights is None else per_sample_weights.flatten().to(compute_dtype(dtype))
        return self._pool(cores, input, offsets, factors).to(dtype)

    def _pool(self, cores: list[Tensor], input: Tensor, offsets: Tensor, factors: Tensor | None) -> Tensor:
        if self.padding_idx is None:
            return self._lookup(cores, input, offsets, factors, self.mode)
        counted = input != self.padding_idx
        # Not a product: a weight that is not a number must not matter where it does not count.
        counts = counted.to(compute_dtype(cores[0].dtype)) if factors is None else factors.where(counted, 0)
        output = self._lookup(cores, input, offsets, counts, "sum")
        if self.mode == "sum":
            return output
        ends = nn.functional.pad(counted.cumsum(0), (1, 0))[offsets.long()]  # int64: a float32 would stop at 2^24
        return output / ends.diff().clamp(min=1)[:, None]

    def _lookup(
        self, cores: list[Tensor], indices: Tensor, offsets: Tensor, factors: Tensor | None, pooling: str
    ) -> Tensor:
        flat = self._flat_behind(cores)
        rows = self._rows_without_gradient(flat, cores, factors)
        options: dict[str, Any] = {
            "per_sample_weights": factors,
            "pooling": pooling,
            "bounds_check_mode": self.bounds_check_mode,
        }
        if rows is not None:
            assert flat is not None
            return rows.lookup(flat, self.layout, indices, offsets, **options)
        return ops.lookup(self._differentiable(flat, cores), self.layout, indices, offsets, **options)

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
