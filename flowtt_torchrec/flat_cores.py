"""Cores as parameters of their own that share one flat buffer: what a module shows, and what the ops take in one call.

Names in a state dict are the names of parameters and buffers, so all that torch does with those (freezing,
``functional_call``, parametrisations, FSDP, distributed checkpoints) works on cores. The ops read one flat tensor. As
long as the parameters lie side by side in one memory, that memory is the flat tensor and nothing is copied; otherwise
they are gathered, differentiably.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from flowtt_torchrec.cores import core_name
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.materialised import MaterialisedRows
from flowtt_torchrec.optimizers import STEP, init_state, split_state, state_names
from flowtt_torchrec.precision import check_weight_dtype, compute_dtype

_version = operator.attrgetter("_version")


class FlatCores(nn.Module):
    """Base of modules whose cores are the parameters ``tt_core<k>`` of one module a table.

    Args:
        layout: of the tables. The cores are made by `_add_cores`, after all other attributes.
    """

    def __init__(self, layout: TTLayout) -> None:
        super().__init__()
        self.layout = layout
        self._materialised: MaterialisedRows | None = None
        self._names = [[core_name(k) for k in range(spec.num_cores)] for spec in layout.specs]
        self._linked: tuple[Tensor, ...]
        self._base: int
        self._forget()
        self.register_load_state_dict_post_hook(_relink)

    def _add_cores(self, device: torch.device | str | None, dtype: torch.dtype) -> None:
        check_weight_dtype(dtype)
        flat = torch.empty(self.layout.num_parameters, device=device, dtype=dtype)
        cores = []
        for (holder, names), views in zip(zip(self._holders(), self._names), self.layout.core_views(flat)):
            for name, view in zip(names, views):
                cores.append(nn.Parameter(view))
                holder.register_parameter(name, cores[-1])
        self._remember(flat, cores)
        self._one_counter = True  # views that are made of a tensor count its changes together

    def _holders(self) -> Iterable[nn.Module]:
        """The module that has the cores of each table."""
        raise NotImplementedError

    @property
    def weights(self) -> Tensor:
        """The flat buffer ``[layout.num_parameters]``: the memory of the cores, without gradient.

        A copy of them where they have been given memory of their own, as by FSDP.
        """
        flat = self._flat_behind(cores := self.current_cores())
        return _gathered(cores).detach() if flat is None else flat.detach()

    @property
    def materialised(self) -> MaterialisedRows | None:
        """What keeps rows for lookups without gradients, after `materialise_rows`."""
        return self._materialised

    def materialise_rows(self, max_bytes: int, strategy: str = "auto") -> None:
        """Lets lookups without gradients keep rows of tables in memory while the weights do not change.

        ``materialised`` then is the `MaterialisedRows` that does it, and tells which tables' rows are kept.

        Args:
            max_bytes: the most that they may take; 0 to keep none any more.
            strategy: as for `MaterialisedRows`.
        """
        self._materialised = MaterialisedRows(max_bytes, strategy) if max_bytes else None

    def split_weights(self) -> dict[str, list[Tensor]]:
        """The cores ``[p_k, r_{k-1}, q_k, r_k]`` of each table: detached views that share the parameters' memory."""
        cores = iter(self.current_cores())
        return {
            name: [next(cores).detach() for _ in spec.p] for name, spec in zip(self.layout.names, self.layout.specs)
        }

    def relink(self) -> None:
        """Lays parameters side by side that have been given memory of their own.

        Called by all that torch does to a module as a whole; call it after assigning to the ``data`` of a core.
        Parameters of several types or devices, and tensors in their places, are left as they are.
        """
        cores = self.current_cores()
        if self._flat_behind(cores) is not None or len({(type(c), c.dtype, c.device) for c in cores}) > 1:
            return
        if type(cores[0]) is not nn.Parameter:
            return
        flat = _gathered([core.detach() for core in cores])
        views = (view for of_table in self.layout.core_views(flat) for view in of_table)
        for core, view in zip(cores, views):
            core.data = view
        self._remember(flat, cores)

    def current_cores(self) -> list[Tensor]:
        """What is in the places of the cores at the moment: parameters, or what ``functional_call`` has put there."""
        places = zip(self._holders(), self._names)
        if torch.compiler.is_compiling():
            return [getattr(holder, name) for holder, names in places for name in names]
        try:
            return [
                of[name]  # type: ignore[misc]
                for holder, names in places
                for of in (holder._parameters,)
                for name in names
            ]
        except KeyError:  # a parametrisation has made an attribute of it
            return [getattr(holder, name) for holder, names in zip(self._holders(), self._names) for name in names]

    def _flat_behind(self, cores: Sequence[Tensor]) -> Tensor | None:
        """The memory of parameters that lie side by side, or none."""
        if torch.compiler.is_compiling():
            # No addresses in a graph. What changes them has brought the parameters together again; see `relink`.
            same = not torch.compiler.is_exporting() and all(a is b for a, b in zip(cores, self._linked))
            return self._flat if same and len(self._linked) == len(cores) else None
        if set(map(type, cores)) != {nn.Parameter}:  # a tensor in its place, a shard
            return None
        flat = self._flat
        if flat is not None:
            if flat.is_meta or cores[0].is_meta:
                return flat if flat.is_meta and all(map(operator.is_, cores, self._linked)) else None
            if self._base != flat.data_ptr():  # also after share_memory
                self._base = flat.data_ptr()
                sizes = [size * flat.element_size() for spec in self.layout.specs for size in spec.core_sizes]
                self._addresses = list(accumulate(sizes[:-1], initial=self._base))
            if list(map(Tensor.data_ptr, cores)) == self._addresses:
                self._linked = tuple(cores)
                return flat
        flat = side_by_side(cores)
        self._remember(flat, cores)  # without one this frees memory that a wrapper has replaced
        return flat

    def _remember(self, flat: Tensor | None, cores: Sequence[Tensor]) -> None:
        self._flat, self._linked = flat, () if flat is None else tuple(cores)
        self._base, self._addresses = 0, []
        self._one_counter = False
        self._versions = -1

    def _forget(self) -> None:
        self._remember(None, ())

    def _note_changes(self, flat: Tensor, cores: Sequence[Tensor]) -> None:
        """Has the version of the flat tensor tell of changes made through parameters that count their own."""
        if self._one_counter or torch.compiler.is_compiling() or flat.is_inference():
            return
        versions = sum(map(_version, cores))
        if versions != self._versions:
            self._versions = versions
            torch.autograd.graph.increment_version(flat)

    def _rows_without_gradient(
        self, flat: Tensor | None, cores: Sequence[Tensor], per_sample_weights: Tensor | None
    ) -> MaterialisedRows | None:
        """What keeps rows, if this lookup may use it."""
        # A compiled graph would take kept rows for constants.
        if self._materialised is None or flat is None or torch.compiler.is_compiling() or flat.is_inference():
            return None
        inputs = [*cores, *(() if per_sample_weights is None else (per_sample_weights,))]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            return None
        self._note_changes(flat, cores)
        return self._materialised

    def _differentiable(self, flat: Tensor | None, cores: Sequence[Tensor]) -> Tensor:
        """The flat tensor as a function of the cores."""
        if flat is None:
            return _gathered(cores)
        if torch.is_grad_enabled() and any(core.requires_grad for core in cores):
            return _FlatWeights.apply(flat, self.layout, *cores)
        return flat

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FlatCores:
        super()._apply(fn, recurse)
        self.relink()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Copies have memory of their own, which they find anew.
        ours = ("_flat", "_linked", "_addresses")
        return {name: value for name, value in self.__dict__.items() if name not in ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        self.relink()


class OptimizerState(nn.Module):
    """State of a fused optimizer as buffers, ``<table>.tt_core<k>_<name>`` and ``<table>.step``, in flat tensors.

    Args:
        layout: of the tables.
        kind: of the optimizer.
        dtype: of the cores.
        device: where the state lives; steps are counted on the CPU, where they are read.

    Attributes:
        flat: the flat tensor of each name, as the ops take it.
    """

    def __init__(self, layout: TTLayout, kind: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layout = layout
        self.kind = kind
        self._fill(init_state(layout, kind, dtype=dtype, device=device))

    def split(self) -> dict[str, list[dict[str, Tensor]]]:
        """Views by table and core; see `flowtt_torchrec.optimizers.split_state`."""
        return split_state(self.layout, self.kind, self.flat)

    def follow(self, dtype: torch.dtype) -> None:
        """Gives the state the types, and the names, that go with cores of a type."""
        names, wide = state_names(self.kind, dtype), compute_dtype(dtype)
        if tuple(self.flat) == names and all(self.flat[name].dtype == wide for name in names if name != STEP):
            return
        kept = {name: self.flat[name] for name in names if name in self.flat}
        flat = {name: state if name == STEP else state.to(wide) for name, state in kept.items()}
        if len(flat) < len(names):  # cores that are rounded count their steps
            flat[STEP] = torch.zeros(self.layout.num_tables, dtype=torch.int64, device="cpu")
        self._fill(flat)

    @torch.no_grad()
    def relink(self) -> None:
        """Brings buffers together that have been assigned."""
        pieces = [(table, key, piece) for table, of in self._pieces.items() for key, piece in of.items()]
        if all(self._buffers_of(table)[key] is piece for table, key, piece in pieces):
            return
        flat = {}
        for name, old in self.flat.items():
            found = [
                self._buffers_of(table)[key].detach().reshape(-1)
                for table, key, _ in pieces
                if key == name or key.endswith(f"_{name}")
            ]
            flat[name] = torch.cat(found).to("cpu" if name == STEP else found[0].device, old.dtype)
        self._fill(flat)

    def _fill(self, flat: Mapping[str, Tensor]) -> None:
        self.flat = dict(flat)
        self._pieces: dict[str, dict[str, Tensor]] = {}
        for table, cores in self.split().items():
            pieces = {
                STEP if name == STEP else f"{core_name(k)}_{name}": piece
                for k, core in enumerate(cores)
                for name, piece in core.items()
            }
            # Not by add_module: a table may be called as a method is.
            self._modules.setdefault(table, nn.Module())
            self._buffers_of(table).clear()
            self._buffers_of(table).update(pieces)
            self._pieces[table] = pieces

    def _buffers_of(self, table: str) -> dict[str, Tensor]:
        return self._modules[table]._buffers  # type: ignore[union-attr,return-value]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OptimizerState:
        flat = {}
        for name, old in self.flat.items():
            new = fn(old)
            if name == STEP:
                flat[name] = new if new.device.type == "cpu" else old
            else:  # its type goes with that of the cores, see `follow`
                flat[name] = new if new.dtype == old.dtype else old.to(new.device)
        if any(flat[name] is not self.flat[name] for name in flat):
            self._fill(flat)
        return self


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """The flat tensor that some tensors are the pieces of, in this order and without gaps, or none."""
    first = tensors[0]
    if first.is_meta:
        return None
    place = first.data_ptr()
    for tensor in tensors:
        like_first = tensor.dtype == first.dtype and tensor.device == first.device and tensor.is_contiguous()
        if not like_first or tensor.data_ptr() != place:
            return None
        place += tensor.nbytes
    storage = first.untyped_storage()
    if place > storage.data_ptr() + storage.nbytes():  # neighbours by chance
        return None
    return first.detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,), first.storage_offset())


def _gathered(cores: Sequence[Tensor]) -> Tensor:
    return torch.cat([core.reshape(-1) for core in cores])


def _relink(module: FlatCores, incompatible_keys: Any) -> None:
    """After loading, which may have assigned tensors (``assign=True``)."""
    module.relink()


class _FlatWeights(torch.autograd.Function):
    """The flat buffer as a function of the cores that are views of it: nothing is copied, its gradient is split."""

    @staticmethod
    def forward(weights: Tensor, layout: TTLayout, *cores: Tensor) -> Tensor:
        return weights.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.layout = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        views = ctx.layout.core_views(grad.contiguous())
        return None, None, *(view for cores in views for view in cores)
