"""Collectives with a backward: values, gradients and gradients of gradients against the same maps on one process."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.contract.collectives import differentiable as collectives

WORLD = 4
SHAPE = (4, 8, 3)


def inputs(shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    """Return the inputs of all ranks."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(WORLD)]


def weights(shape: tuple[int, ...]) -> list[Tensor]:
    """Return the factors of all ranks' outputs in their losses."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(WORLD)]


def output_and_gradients(name: str, args: tuple[object, ...]) -> tuple[Tensor, Tensor, Tensor]:
    rank, group = dist.get_rank(), dist.group.WORLD
    x = inputs()[rank].requires_grad_()
    y = getattr(collectives, name)(x, *args, group)
    w = weights(tuple(y.shape))[rank].requires_grad_()
    (gradient,) = torch.autograd.grad((y * w).sum(), x, create_graph=True)
    # The gradient is linear in w, so its derivative is the transpose of the backward: the forward's kind of map.
    (second,) = torch.autograd.grad((gradient * inputs()[rank]).sum(), w)
    return y.detach(), gradient.detach(), second


def chunks(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    return x.chunk(WORLD, dim)


def expected(
    name: str, dim: int
) -> tuple[Callable[[int, list[Tensor]], Tensor], Callable[[int, list[Tensor]], Tensor]]:
    """Return forward and backward of a rank as functions of all ranks' inputs."""
    own = lambda rank, xs: xs[rank]  # noqa: E731
    total = lambda rank, xs: sum(xs)  # noqa: E731
    joined = lambda rank, xs: torch.cat(xs, dim)  # noqa: E731
    sliced = lambda rank, xs: chunks(xs[rank], dim)[rank]  # noqa: E731
    sum_sliced = lambda rank, xs: chunks(sum(xs), dim)[rank]  # noqa: E731

    return {
        "copy_to": (own, total),
        "reduce_from": (total, own),
        "gather": (joined, sum_sliced),
        "gather_same": (joined, sliced),
        "scatter": (sliced, joined),
        "reduce_scatter": (sum_sliced, joined),
    }[name]


@pytest.mark.parametrize(("name", "dims"), [
    ("copy_to", [None]),
    ("reduce_from", [None]),
    ("gather", [0, 1, -1]),
    ("gather_same", [1]),
    ("scatter", [0, 1]),
    ("reduce_scatter", [0, 1]),
])  # fmt: skip
def test_forward_and_backward(ranks, name, dims):
    for dim in dims:
        forward, backward = expected(name, dim or 0)
        results = ranks(output_and_gradients, WORLD, name, () if dim is None else (dim,))
        ws = weights(tuple(results[0][0].shape))
        for rank, (y, gradient, second) in enumerate(results):
            torch.testing.assert_close(y, forward(rank, inputs()))
            torch.testing.assert_close(gradient, backward(rank, ws))
            assert second.shape == y.shape
            torch.testing.assert_close(second, y)


def rows_sent_and_back(counts: list[list[int]]) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    send, receive = counts[rank], [row[rank] for row in counts]
    x = torch.full((sum(send), 2), float(rank), requires_grad=True)
    y = collectives.all_to_all(x, dist.group.WORLD, send, receive)
    (y * (rank + 1)).sum().backward()
    return y.detach()[:, 0], x.grad[:, 0]


def test_all_to_all_routes_rows_and_gradients(ranks):
    counts = [[1, 0, 2], [0, 0, 3], [4, 1, 0]]  # [from][to]
    for rank, (y, gradient) in enumerate(ranks(rows_sent_and_back, 3, counts)):
        assert y.tolist() == [float(source) for source in range(3) for _ in range(counts[source][rank])]
        assert gradient.tolist() == [float(to + 1) for to in range(3) for _ in range(counts[rank][to])]


def refusals() -> list[str]:
    texts = []
    group = dist.group.WORLD
    for call in (
        lambda: collectives.scatter(torch.zeros(2, 5), 1, group),
        lambda: collectives.all_to_all(torch.zeros(4), group, [1, 1], [2, 2]),
    ):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            call()
        texts.append(str(raised.value))
    return texts


def test_refuses_indivisible_sizes(ranks):
    slices, counts = ranks(refusals, 2)[0]
    assert "(2, 5)" in slices
    assert "multiple of 2" in slices
    assert "send=[1, 1]" in counts
