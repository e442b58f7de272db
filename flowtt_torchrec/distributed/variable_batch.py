"""Features with a batch size of their own (VBE): lookups pad them to one size, outputs are cut as TorchRec has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Strides = Sequence[Sequence[int]]


def with_inverse_indices_in_order(features: KeyedJaggedTensor, order: Sequence[str]) -> KeyedJaggedTensor:
    """The same batch, its inverse indices in the order of these features, if those are all of them, once each.

    TorchRec divides row-wise means by lengths in the order of the plan, which it takes from inverse indices as if they
    were in that order; only where features repeat it looks at names.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is None or list(order) == inverse[0] or sorted(order) != sorted(inverse[0]):
        return features
    places = torch.tensor([inverse[0].index(name) for name in order], device=inverse[1].device)
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride_per_key_per_rank=features.stride_per_key_per_rank(),
        inverse_indices=(list(order), inverse[1][places]),
    )


def even_offsets(offsets: Tensor, strides: Sequence[int]) -> Tensor:
    """Offsets with as many bags a feature as the largest has; the bags added are empty.

    Args:
        offsets: ``[sum(strides) + 1]``.
        strides: bags of each feature.

    Returns:
        ``[len(strides) * max(strides) + 1]``.
    """
    counts = torch.tensor(strides, device=offsets.device)
    most = max(strides, default=0)
    bags = torch.arange(most, device=offsets.device).minimum(counts[:, None])
    first = counts.cumsum(0) - counts
    return torch.cat([offsets[(first[:, None] + bags).flatten()], offsets[-1:]])


def by_rank(pooled: Tensor, dims: Sequence[int], strides: Strides) -> Tensor:
    """Cuts out the bags that there are, in TorchRec's order: for each rank, for each feature, its bags, in one row.

    Args:
        pooled: ``[bags, sum(dims)]``, each feature's bags from the top.
        dims: columns of each feature.
        strides: for each feature, its bags on each rank.
    """
    pieces = [
        columns[: sum(of_feature)].split(list(of_feature))
        for columns, of_feature in zip(pooled.split(list(dims), dim=1), strides)
    ]
    return torch.cat([piece.flatten() for of_rank in zip(*pieces) for piece in of_rank])


def merge_groups(outputs: Sequence[Tensor], dims: Sequence[Sequence[int]], strides: Sequence[Strides]) -> Tensor:
    """One output in TorchRec's order from those of several groups.

    Args:
        outputs: of each group, in one row as `by_rank` makes it.
        dims: for each group, the columns of each feature.
        strides: for each group and feature, its bags on each rank.
    """
    pieces = []
    for output, of_features, of_strides in zip(outputs, dims, strides):
        by_feature = [[dim * stride for stride in of_feature] for dim, of_feature in zip(of_features, of_strides)]
        pieces.append(output.split([sum(of_rank) for of_rank in zip(*by_feature)]))
    return torch.cat([piece for of_rank in zip(*pieces) for piece in of_rank])
