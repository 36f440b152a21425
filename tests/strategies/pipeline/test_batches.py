"""Splitting of nested batches into micro-batches."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from trainwright.strategies.pipeline.micro_batches import batch_size_of, part_sizes, signature, split_batch

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Sample:
    x: Tensor
    tag: str


class Rich(UserDict):  # type: ignore[type-arg]
    extra = "kept"


def test_split_nested_batch() -> None:
    x = torch.arange(14).view(7, 2)
    batch = {
        "x": x,
        "pair": Pair(x, [x, (x,)]),
        "sample": Sample(x, "t"),
        "rich": Rich(a=x),
        "names": list("abcdefg"),
        "scale": 2.0,
        "none": None,
        "scalar": torch.tensor(3),
        "proxy": MappingProxyType({"a": x}),
        "array": x.numpy(),
    }
    parts = split_batch(batch, 4)
    assert [len(part["x"]) for part in parts] == [2, 2, 2, 1]
    for get in (
        lambda part: part["x"],
        lambda part: part["pair"].right[1][0],
        lambda part: part["sample"].x,
        lambda part: part["rich"]["a"],
        lambda part: part["proxy"]["a"],
        lambda part: torch.from_numpy(part["array"]),
    ):
        assert torch.equal(torch.cat([get(part) for part in parts]), x)
    assert [part["names"] for part in parts] == [["a", "b"], ["c", "d"], ["e", "f"], ["g"]]
    assert all(part["scale"] == 2.0 and part["none"] is None and part["scalar"] == 3 for part in parts)
    assert isinstance(parts[0]["pair"], Pair)
    assert isinstance(parts[0]["rich"], Rich)
    assert isinstance(parts[0]["sample"], Sample)
    assert parts[0]["x"].data_ptr() == x.data_ptr()
    assert len(batch["names"]) == 7  # type: ignore[arg-type]


def test_split_batch_encoding() -> None:
    transformers = pytest.importorskip("transformers")
    parts = split_batch(transformers.BatchEncoding({"ids": torch.arange(4)}), 2)
    assert isinstance(parts[1], transformers.BatchEncoding)
    assert parts[1]["ids"].tolist() == [2, 3]


def test_split_along_other_dims() -> None:
    batch = ({"x": torch.zeros(4, 3)}, torch.zeros(5, 4), torch.zeros(9))
    with pytest.raises(ValueError, match=r"'1' .* batch_dims=\{'1': <dim>\}.*batch_dims=\{'1': null\}"):
        split_batch((batch[0], batch[1], torch.zeros(4)), 2)
    first, _ = split_batch(batch, 2, {"1": 1, "2": None})
    assert [tuple(t.shape) for t in (first[0]["x"], first[1], first[2])] == [(2, 3), (5, 2), (9,)]
    with pytest.raises(ValueError, match="names \\['3'\\].*0.x"):
        split_batch(batch, 2, {"1": 1, "2": None, "3": 0})
    with pytest.raises(ValueError, match="must be below 2"):
        split_batch(batch, 2, {"1": 2, "2": None})


def test_split_errors() -> None:
    class Graph:
        def __init__(self) -> None:
            self.x = torch.zeros(4)

    with pytest.raises(ValueError, match="no tensor with a batch dimension"):
        split_batch({"a": 1}, 2)
    with pytest.raises(ValueError, match="Use 1 to 2"):
        split_batch(torch.zeros(2), 3)
    with pytest.raises(TypeError, match="Graph at 'g'"):
        split_batch({"x": torch.zeros(4), "g": Graph()}, 2)


def test_sizes_and_signatures() -> None:
    assert part_sizes(7, 3) == [3, 2, 2]
    assert [part.tolist() for part in split_batch(torch.arange(3), 2)] == [[0, 1], [2]]
    assert batch_size_of(torch.zeros(2, 6), {"": 1}) == 6
    assert signature({"x": torch.zeros(2)}) == signature({"x": torch.ones(2)})
    assert signature({"x": torch.zeros(2)}) != signature({"x": torch.zeros(3)})
    assert signature({"x": torch.zeros(2)}) != signature({"x": torch.zeros(2).long()})
