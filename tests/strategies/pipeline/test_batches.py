"""Splitting of nested batches into micro-batches."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from trainwright.strategies.pipeline.batch_kinds import register_batch
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


class Nodes:
    """Items of several sizes in one object, each known by its class."""

    def __init__(self, *rows: Tensor) -> None:
        self.rows = rows


class Table(dict):  # type: ignore[type-arg]
    """As a TensorDict: items along ``batch_size``."""

    @property
    def batch_size(self) -> torch.Size:
        return self["x"].shape[:1]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else Table({k: v[key] for k, v in self.items()})


class Molecules:
    """As a batch of PyTorch Geometric."""

    def __init__(self, graphs: list[Tensor], follow_batch: list[str]) -> None:
        self.x, self.graphs, self.num_graphs, self.follows = torch.cat(graphs), graphs, len(graphs), follow_batch

    @classmethod
    def from_data_list(cls, graphs: list[Tensor], follow_batch: list[str]) -> "Molecules":
        return cls(graphs, follow_batch)

    def to_data_list(self) -> list[Tensor]:
        return self.graphs

    def keys(self) -> list[str]:
        return ["x", *(f"{key}_batch" for key in self.follows)]


def test_split_objects() -> None:
    register_batch(Nodes, lambda nodes: len(nodes.rows), lambda nodes, piece: Nodes(*nodes.rows[piece]))
    rows = [torch.full((size, 2), size) for size in (1, 3, 2)]
    batch = {"y": torch.arange(3), "of": (Nodes(*rows), Table(x=torch.arange(3)), Molecules(rows, ["x"]))}
    first, second = split_batch(batch, 2)
    for part, wanted, y in ((first, rows[:2], [0, 1]), (second, rows[2:], [2])):
        nodes, table, graphs = part["of"]
        assert part["y"].tolist() == table["x"].tolist() == y
        assert len(nodes.rows) == graphs.num_graphs == len(wanted)
        assert torch.equal(torch.cat(nodes.rows), torch.cat(wanted))
        assert torch.equal(graphs.x, torch.cat(wanted))
        assert graphs.follows == ["x"]
    assert batch_size_of(Nodes(*rows)) == 3
    with pytest.raises(ValueError, match=r"'y' .*register_batch\(cls, size, select\)"):
        split_batch({**batch, "y": torch.arange(4)}, 2)


def test_sizes_and_signatures() -> None:
    assert part_sizes(7, 3) == [3, 2, 2]
    assert [part.tolist() for part in split_batch(torch.arange(3), 2)] == [[0, 1], [2]]
    assert batch_size_of(torch.zeros(2, 6), {"": 1}) == 6
    assert signature({"x": torch.zeros(2)}) == signature({"x": torch.ones(2)})
    assert signature({"x": torch.zeros(2)}) != signature({"x": torch.zeros(3)})
    assert signature({"x": torch.zeros(2)}) != signature({"x": torch.zeros(2).long()})
