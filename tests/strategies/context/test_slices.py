"""Tensors split by position compared with whole ones."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.strategies.context.test_engine import LENGTH as TRAINED_LENGTH
from tests.strategies.context.test_engine import VOCABULARY, assert_as_one_process, built, split, tokens_of
from trainwright.strategies.context.order import SequenceOrder
from trainwright.strategies.context.slices import SequenceRows, SequenceSlice
from trainwright.strategies.plan.blocks import find_blocks

BATCH, LENGTH, WIDTH = 2, 8, 6


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"matrix": (5, WIDTH), "row": (WIDTH,), "table": (LENGTH, WIDTH), "all": (BATCH, LENGTH, 1)}
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


def labels(last: int = LENGTH) -> torch.Tensor:
    found = torch.randint(5, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    found[0, :3] = -100
    return found[:, :last]


def shifted_loss(x: torch.Tensor, w: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
    logits = F.linear(x, w["matrix"])[..., :-1, :]
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels()[:, 1:].flatten(), **kwargs)


def rms(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return w["row"] * (x * torch.rsqrt(variance + 1e-6)).to(x.dtype)


# Name -> function, and whether it stays with the rows of a rank up to its result.
FUNCTIONS: dict[str, tuple[Any, bool]] = {
    "linear": (lambda x, w: F.linear(x, w["matrix"]), True),
    "norm": (lambda x, w: F.layer_norm(x, (WIDTH,), w["row"]) + F.rms_norm(x, (WIDTH,), w["row"]), True),
    "rms by hand": (rms, True),
    "table": (lambda x, w: 2 - x * w["table"] / 3, True),
    "all": (lambda x, w: F.gelu(x) * w["all"], True),
    "positions": (lambda x, w: x[:, 1:-1][:, 2:] * 2, True),
    "one chunk is empty": (lambda x, w: x[:, 3:, 1:4], True),
    "flat": (lambda x, w: x[:, :-1].reshape(-1, WIDTH).softmax(-1), True),
    "there and back": (lambda x, w: x.flatten(0, 1).view(BATCH, LENGTH, 3, 2).sum(-1), True),
    "flat with all": (lambda x, w: x.view(-1, WIDTH) + w["table"].repeat(BATCH, 1), True),
    "all dims": (lambda x, w: x.flatten(), False),
    "transposed": (lambda x, w: x.transpose(0, 1), False),
    "last position": (lambda x, w: x[:, -1], False),
    "mean of positions": (lambda x, w: x.mean(1), False),
    "norm of all": (lambda x, w: F.layer_norm(x, (LENGTH, WIDTH)), False),
    "beside a whole one": (lambda x, w: torch.cat((x, torch.ones(BATCH, LENGTH, 1)), -1), False),
    "loss": (shifted_loss, False),
    "summed loss": (lambda x, w: shifted_loss(x, w, reduction="sum", label_smoothing=0.1), False),
    "losses": (lambda x, w: shifted_loss(x, w, reduction="none"), False),
    "loss of classes in the middle": (
        lambda x, w: F.cross_entropy(F.linear(x, w["matrix"]).transpose(1, 2), labels()),
        False,
    ),
}


def inputs() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()


def applied(x: torch.Tensor, like: torch.Tensor, function: Any) -> tuple[torch.Tensor, list[torch.Tensor], bool]:
    """Result, gradients of ``like`` and the weights, and whether the result was that of rows."""
    w = weights()
    out = function(x, w)
    is_slice = isinstance(out, SequenceSlice)
    out = out.whole() if isinstance(out, SequenceSlice) else out
    (out * out.detach().cos()).sum().backward()
    gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in (like, *w.values())]
    return out.detach(), gradients, is_slice


def applied_to_slices(balance: bool) -> dict[str, tuple[torch.Tensor, list[torch.Tensor], bool]]:
    order = SequenceOrder.of(dist.group.WORLD, balance)
    results = {}
    for name, (function, _) in FUNCTIONS.items():
        whole = inputs()
        x = SequenceSlice(order.part(whole, 1), SequenceRows(dist.group.WORLD, order, LENGTH, 0, LENGTH))
        assert x.shape == whole.shape
        out, gradients, is_slice = applied(x, whole, function)
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= order.size
        results[name] = (out, gradients, is_slice)
    return results


@pytest.mark.parametrize(("world_size", "balance"), [(2, True), (4, True), (2, False)])
def test_functions_match_one_process(ranks, world_size, balance):
    for results in ranks(applied_to_slices, world_size, balance, timeout=60):
        for name, (function, is_row_wise) in FUNCTIONS.items():
            x = inputs()
            want, gradients, _ = applied(x, x, function)
            out, got, is_slice = results[name]
            assert is_slice == is_row_wise, name
            torch.testing.assert_close(out, want, msg=lambda m, n=name: f"{n}: {m}")
            for a, b in zip(got, gradients, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"gradient of {n}: {m}")


class _Largest(TorchDispatchMode):
    """Records the most rows of a tensor whose last dim is the vocabulary (but for heads, whose rows are the width)."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.size(-1) == VOCABULARY:
                self.rows = max(self.rows, leaf.numel() // VOCABULARY if leaf.size(0) not in (16, 32) else 0)
        return result


def observed_loss() -> bool:
    """Return whether logits stay split when an observer replaces cross-entropy."""
    original = F.cross_entropy
    F.cross_entropy = partial(lambda _, loss, *args, **kwargs: loss(*args, **kwargs), "observer", original)
    try:
        return split_training("gpt", True)[2] == TRAINED_LENGTH
    finally:
        F.cross_entropy = original


def test_observed_loss_stays_split(ranks):
    assert ranks(observed_loss, 2, timeout=60) == [True, True]


def split_training(model: str, outputs: bool) -> tuple[float, dict[str, torch.Tensor], int]:
    module = built(model)
    split(module, split_outputs=outputs)
    with _Largest() as largest:
        loss = module(tokens_of())
        loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return loss.item(), gradients, largest.rows


@pytest.mark.sample(4)
@pytest.mark.parametrize("model", ["gpt", "llama", "padded-llama", "encoder"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_trains_like_one_process_with_split_logits(ranks, model, world_size):
    results = ranks(split_training, world_size, model, True, timeout=60)
    assert_as_one_process([(loss, gradients) for loss, gradients, _ in results], model)
    if model != "encoder":  # it has no logits
        whole = 2 * TRAINED_LENGTH
        assert {largest for *_, largest in results} == {whole // world_size}
    if (model, world_size) == ("gpt", 2):
        assert {largest for *_, largest in ranks(split_training, 2, model, False, timeout=60)} == {whole}


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


def custom_function(function: Any) -> None:
    dist.barrier()  # a rank could be gone before the other has connected
    order = SequenceOrder.of(dist.group.WORLD, True)
    x = SequenceSlice(nn.Parameter(torch.ones(2, 4, 3)), SequenceRows(dist.group.WORLD, order, 8, 0, 8))
    function.apply(x).sum().backward()


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.ones(2, 8, 3)


@pytest.mark.parametrize("function", [_Twice, _Plain])
def test_refuses_custom_autograd_functions(ranks, function):
    with pytest.raises(AssertionError, match="split_outputs=False"):
        ranks(custom_function, 2, function, timeout=60)


def sharded_training(model: str) -> tuple[float, dict[str, torch.Tensor]]:
    """With FSDP2 around the blocks and the whole, which averages over the same ranks."""
    module = built(model)
    split(module, split_outputs=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in find_blocks(module).values():
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    loss = module(tokens_of())
    loss.backward()
    return loss.item(), {name: p.grad.full_tensor() for name, p in module.named_parameters()}


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_trains_under_fsdp(ranks, model):
    assert_as_one_process(ranks(sharded_training, 2, model, timeout=60), model)
