"""Second and forward-mode derivatives: right, or an error; never a part of the truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from tt_samples import assert_near, layout_of, random_batch, random_weights

from flowtt_torchrec import ops
from flowtt_torchrec.embedding_bag import BatchedTTEmbeddingBags, TTEmbeddingBag
from flowtt_torchrec.optimizers import OptimizerSpec

LAYOUT = layout_of("three_cores", "two_cores")
SECOND = r"tensor-train lookups have no second derivative \(create_graph=True\)"
FORWARD = "tensor-train lookups have no forward-mode derivative"


def inputs() -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Weights, factors and a batch."""
    indices, offsets = random_batch(LAYOUT, 5)
    factors = torch.linspace(0.5, 1.5, indices.numel(), dtype=torch.float64).requires_grad_()
    return random_weights(LAYOUT).requires_grad_(), factors, (indices, offsets)


def lookup(weights: Tensor, factors: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return ops.lookup(weights, LAYOUT, *batch, per_sample_weights=factors)


def penalty(weights: Tensor, factors: Tensor, batch: tuple[Tensor, Tensor], of: str) -> Tensor:
    loss = lookup(weights, factors, batch).pow(3).sum()
    (grad,) = torch.autograd.grad(loss, weights if of == "weights" else factors, create_graph=True)
    return grad.square().sum()


@pytest.mark.parametrize("of", ["weights", "factors"])
def test_a_gradient_penalty_is_an_error_or_right(of: str) -> None:
    weights, factors, batch = inputs()
    with ops.use_backend("native"):
        value = penalty(weights, factors, batch, of)
        with pytest.raises(NotImplementedError, match=SECOND):
            value.backward()
    with ops.use_backend("reference"):
        value = penalty(weights, factors, batch, of)
        (grad,) = torch.autograd.grad(value, weights)
        direction = torch.randn_like(weights) * 1e-6
        moved = penalty((weights + direction).detach().requires_grad_(), factors, batch, of)
        assert_near((grad * direction).sum(), (moved - value).detach(), 1e-3)


def fused(indices: Tensor, offsets: Tensor, factors: Tensor, **options: Any) -> Tensor:
    specs = dict(zip(LAYOUT.names, LAYOUT.specs))
    module = BatchedTTEmbeddingBags(specs, optimizer=OptimizerSpec("sgd"), dtype=torch.float64, **options)
    return module(indices, offsets, factors)


@pytest.mark.parametrize("keep", [False, True], ids=["in place", "kept"])
def test_a_penalty_through_a_fused_step_is_an_error(keep: bool) -> None:
    _, factors, batch = inputs()
    output = fused(*batch, factors, keep_forward_weights=keep)
    (grad,) = torch.autograd.grad(output.pow(3).sum(), factors, create_graph=True)
    with pytest.raises(NotImplementedError, match=SECOND):
        grad.square().sum().backward()


def test_what_does_not_go_through_the_gradient_of_a_lookup_is_right() -> None:
    """A penalty on the gradient of a dense layer below, as in a model with both."""
    weights, factors, batch = inputs()
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    grads = []
    for backend in ("native", "reference"):
        with ops.use_backend(backend):
            loss = (scale.square() * lookup(weights, factors, batch)).pow(3).sum()
            (grad,) = torch.autograd.grad(loss, scale, create_graph=True)
            grads.append(torch.autograd.grad(grad, [weights, scale]))
    for mine, expected in zip(*grads):
        assert_near(mine, expected)


@pytest.mark.parametrize("of", ["weights", "factors"])
def test_forward_mode_is_an_error_or_right(of: str) -> None:
    weights, factors, batch = inputs()
    tangents = torch.randn_like(weights), torch.randn_like(factors)

    def along(weights: Tensor, factors: Tensor) -> Tensor | None:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, tangent) for t, tangent in zip((weights, factors), tangents)]
            pair = (duals[0], factors) if of == "weights" else (weights, duals[1])
            return forward_ad.unpack_dual(lookup(*pair, batch)).tangent

    for requires_grad in (True, False):
        arguments = [t.detach().requires_grad_(requires_grad) for t in (weights, factors)]
        with ops.use_backend("native"), pytest.raises(NotImplementedError, match=FORWARD):
            along(*arguments)
    with ops.use_backend("reference"):
        (expected,) = torch.autograd.functional.jvp(
            lambda x: lookup(x, factors, batch) if of == "weights" else lookup(weights, x, batch),
            weights if of == "weights" else factors,
            tangents[0] if of == "weights" else tangents[1],
        )[1:]
        assert_near(along(weights.detach(), factors.detach()), expected)
    with ops.use_backend("native"), pytest.raises((NotImplementedError, RuntimeError), match=r"jvp|forward-mode"):
        torch.func.jvp(lambda x: lookup(x, factors, batch), (weights,), (tangents[0],))


def test_func_grad_is_the_gradient() -> None:
    weights, factors, batch = inputs()
    with ops.use_backend("native"):
        expected = torch.autograd.grad(lookup(weights, factors, batch).pow(2).sum(), [weights, factors])
        grads = torch.func.grad(lambda w, f: lookup(w, f, batch).pow(2).sum(), argnums=(0, 1))(weights, factors)
        assert all(map(torch.equal, grads, expected))

        def squares(factors: Tensor) -> Tensor:
            return lookup(weights, factors, batch).pow(2).sum()

        with pytest.raises(NotImplementedError, match=SECOND):
            torch.func.grad(lambda f: torch.func.grad(squares)(f).square().sum())(factors)
        bag = TTEmbeddingBag(100, 12, rank=4, mode="sum")
        per_factor = torch.func.grad(lambda f: bag(torch.tensor([[1, 2]]), per_sample_weights=f).sum())
        assert per_factor(torch.ones(1, 2)).shape == (1, 2)
