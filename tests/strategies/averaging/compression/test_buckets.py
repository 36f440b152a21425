"""Buckets of named parts: what is kept back belongs to its part, and waits where there is no gradient."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.strategies.averaging.compression.buckets import CHUNK_RESIDUAL, RESIDUAL, ReplicaPart, make_buckets
from trainwright.strategies.averaging.compression.names import compressor_names, make_compressor
from trainwright.strategies.averaging.compression.options import choose_compression
from trainwright.strategies.averaging.compression.replicas import ReplicaAverage

SHAPES = {"a": (12, 8), "b": (8,), "c": (), "d": (5, 7), "e": (3, 0), "f": (40,)}


def parts() -> list[ReplicaPart]:
    return [ReplicaPart(name, nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]


def gradient(name: str, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + ord(name))
    return torch.randn(SHAPES[name], generator=generator)


def chosen(name: str) -> Any:
    """Of a rank so small that matrices of this size are shortened."""
    options = {"powersgd": {"rank": 1, "warmup_steps": 0}, "topk": {"warmup_steps": 0}}
    return choose_compression({"name": name, **options.get(name, {})})


def averaged(name: str, steps: int, skipped: tuple[str, int]) -> dict[str, Any]:
    """Sums of what was averaged, and what is kept back; ``skipped`` part has no gradient in that step."""
    average = ReplicaAverage(chosen(name), torch.device("cpu"))
    held = parts()
    average.take(held)
    sent = {part.name: torch.zeros_like(part.parameter.detach()) for part in held}
    for step in range(steps):
        for part in held:
            is_left_out = (part.name, step) == skipped
            part.parameter.grad = None if is_left_out else gradient(part.name, step, dist.get_rank())
        before = {(part.name, kind): value.clone() for part, kind, value in average.kept_back()}
        average.average()
        for part, kind, value in average.kept_back():
            if (part.name, step) == skipped:
                assert torch.equal(value, before[part.name, kind]), "it waits"
        for part in held:
            if part.parameter.grad is not None:
                sent[part.name] += part.parameter.grad
    kept = {(part.name, kind): value.clone() for part, kind, value in average.kept_back()}
    return {"sent": sent, "kept": kept}


@pytest.mark.parametrize("name", ["topk", "powersgd", "onebit"])
def test_what_is_kept_back_belongs_to_its_part(ranks: Any, name: str) -> None:
    """What was averaged and what is kept back add up to the mean of the gradients, part by part."""
    steps, skipped = 4, ("d", 2)
    results = ranks(averaged, 3, name, steps, skipped)
    for part in SHAPES:
        given = sum(gradient(part, step, rank) for step in range(steps) for rank in range(3) if (part, step) != skipped)
        for result in results:
            assert torch.equal(result["sent"][part], results[0]["sent"][part])
        found = results[0]["sent"][part].clone()
        for result in results:
            found += result["kept"].get((part, RESIDUAL), torch.zeros(SHAPES[part])) / 3
            found += result["kept"].get((part, CHUNK_RESIDUAL), torch.zeros(SHAPES[part]))  # of one rank's chunk each
        torch.testing.assert_close(found, given / 3, rtol=1e-4, atol=1e-4)


def moved(name: str) -> None:
    """What is kept back can be taken out and put into other buckets, and stays where parts come and go."""
    average = ReplicaAverage(chosen(name), torch.device("cpu"))
    held = parts()
    average.take(held)
    for part in held:
        part.parameter.grad = gradient(part.name, 0, dist.get_rank())
    average.average()
    kept = {(part.name, kind): value.clone() for part, kind, value in average.kept_back()}
    assert any(value.any() for value in kept.values())
    other = ReplicaAverage(chosen(name), torch.device("cpu"))
    other.take(parts())
    for kind in (RESIDUAL, CHUNK_RESIDUAL):
        other.keep_back(kind, {part: value for (part, of_kind), value in kept.items() if of_kind == kind})
    other.put_back_of_buckets({key: value.clone() for key, value in average.of_buckets().items()})
    again = {(part.name, kind): value for part, kind, value in other.kept_back()}
    assert all(torch.equal(again[key], value) for key, value in kept.items())
    for key, value in average.of_buckets().items():
        assert torch.equal(other.of_buckets()[key], value)
    average.take([part for part in held if part.name != "b"])
    for part, kind, value in average.kept_back():
        if kind == RESIDUAL:
            assert torch.equal(value, kept[part.name, RESIDUAL])


@pytest.mark.parametrize("name", ["topk", "powersgd", "onebit"])
def test_moved(ranks: Any, name: str) -> None:
    ranks(moved, 2, name)


def exact_means(dtype: torch.dtype) -> list[Tensor]:
    """Of parts of two dtypes, beside each other."""
    average = ReplicaAverage(chosen("topk"), torch.device("cpu"))
    wide, narrow = nn.Parameter(torch.zeros(3, dtype=dtype)), nn.Parameter(torch.ones(2))
    average.take([ReplicaPart("wide", wide), ReplicaPart("narrow", narrow)])
    for parameter in (wide, narrow):
        parameter.grad = torch.full_like(parameter, 1 / 3 + dist.get_rank() / 7)
    average.average(exactly=True)
    return [parameter.grad for parameter in (wide, narrow) if parameter.grad is not None]


def test_exact_means_are_of_the_dtype_of_the_gradients(ranks: Any) -> None:
    for wide, narrow in ranks(exact_means, 2, torch.float64):
        torch.testing.assert_close(wide, torch.full((3,), 1 / 3 + 1 / 14, dtype=torch.float64), rtol=1e-15, atol=0)
        torch.testing.assert_close(narrow, torch.full((2,), 1 / 3 + 1 / 14))


def buckets_of_kin() -> list[list[str]]:
    held = [ReplicaPart(name, nn.Parameter(torch.zeros(4)), kin=kin) for name, kin in zip("abcd", "xyxz", strict=True)]
    held.append(ReplicaPart("big", nn.Parameter(torch.zeros(8 * 2**20)), kin="x"))
    made = make_buckets(make_compressor("bf16"), held, torch.device("cpu"))
    return [[part.name for part in bucket.parts] for bucket in made]


def test_parts_of_different_kin_do_not_travel_together(ranks: Any) -> None:
    assert ranks(buckets_of_kin, 2)[0] == [["a", "c"], ["b"], ["d"], ["big"]]


def sparse() -> None:
    average = ReplicaAverage(chosen("topk"), torch.device("cpu"))
    part = ReplicaPart("table", nn.Parameter(torch.zeros(4, 2)))
    average.take([part])
    part.parameter.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (4, 2))
    with pytest.raises(RuntimeError, match="gradient of table is sparse.*sparse=False, or type compression=none"):
        average.average()


def test_sparse_gradients_are_refused(ranks: Any) -> None:
    ranks(sparse, 2)


def scaled(scale: float) -> list[Tensor]:
    """Averages divided by the loss scale, which changes on the way, and of one step of infinite gradients."""
    now = [1.0]
    average = ReplicaAverage(chosen("topk"), torch.device("cpu"), lambda: now[0])
    part = ReplicaPart("f", nn.Parameter(torch.zeros(40)))
    average.take([part])
    found = []
    for step in range(5):
        now[0] = scale ** (step % 3)
        if step == 2 and scale != 1:
            part.parameter.grad = gradient("f", 77, 0) * now[0]
            part.parameter.grad[3] = float("inf") if dist.get_rank() == 1 else 1.0
            average.average()
            assert not torch.isfinite(part.parameter.grad).all()
        part.parameter.grad = gradient("f", step, dist.get_rank()) * now[0]
        average.average()
        found.append(part.parameter.grad / now[0])
    return found


def test_what_is_kept_back_outlives_the_loss_scale(ranks: Any) -> None:
    """A dropped step leaves no trace, and what is kept back is in units of the gradient."""
    plain, with_scale = ranks(scaled, 2, 1.0)[0], ranks(scaled, 2, 1024.0)[0]
    for ours, theirs in zip(with_scale, plain, strict=True):
        assert torch.equal(ours, theirs)


def test_names() -> None:
    assert compressor_names() == ("fp16", "bf16", "int8", "topk", "powersgd", "onebit")
