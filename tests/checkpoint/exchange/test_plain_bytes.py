"""Values round-trip as messages between ranks, and reading them runs no code."""

import json
import pickle
import random
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from trainwright.checkpoint.exchange.plain_bytes import pack, unpack
from trainwright.checkpoint.format.tree import UnsupportedValueError
from trainwright.core.errors import CheckpointError

RAN: list[str] = []


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    value: Any

    def __post_init__(self) -> None:
        RAN.append("constructor")


@dataclass(frozen=True)
class Frozen:
    value: Any


class Evil:
    def __reduce__(self) -> Any:
        return RAN.append, ("pickle",)


VALUES = [
    None, True, -3, 2**80, 0.1, float("inf"), 1j, "text", "", b"\0\xff", torch.float16, torch.Size([2, 3]),
    [1, [2, (3, None)]], {"a": 1, 2: "b", (1, 2): 3}, {1, 2}, frozenset({"x"}), {"~record": "dict", "~": 1},
    OrderedDict(b=1, a=2), deque([1, 2], maxlen=5), defaultdict(list, {"k": [1]}),
    Pair(1, Pair("a", None)), Frozen((1, {"k": Pair(1, 2)})), {Pair(1, 2): {Pair(3, 4)}},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_round_trip(value: Any) -> None:
    again = unpack(pack(value))
    assert again == value
    assert type(again) is type(value)
    assert pack(again) == pack(value)


def test_tensors_and_arrays() -> None:
    given = {
        "a": torch.arange(6.0).view(2, 3).t(),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.tensor(7, dtype=torch.uint8),
        "d": torch.empty(0, 4),
        "e": torch.tensor([True, False]),
    }
    again = unpack(pack(given))
    for name, tensor in given.items():
        assert torch.equal(again[name], tensor)
        assert again[name].dtype == tensor.dtype
    assert (unpack(pack(np.arange(4))) == np.arange(4)).all()


def test_outputs_of_models_and_records_of_users() -> None:
    again = unpack(pack(BaseModelOutput(last_hidden_state=torch.ones(2))))
    assert type(again) is BaseModelOutput
    assert torch.equal(again.last_hidden_state, torch.ones(2))
    sent = pack(Record(3))
    RAN.clear()
    assert unpack(sent).value == 3
    assert RAN == []  # no constructor runs


@pytest.mark.parametrize("value", [object(), lambda: 0, Evil(), {"k": object()}, Frozen(object()), RAN.append, Evil])
def test_unsupported_values_are_refused(value: Any) -> None:
    with pytest.raises(UnsupportedValueError):
        pack(value)


def message(tree: Any, forms: Any = ()) -> bytes:
    text = json.dumps([tree, forms]).encode()
    return len(text).to_bytes(8, "little") + text


def test_hostile_messages_run_nothing() -> None:
    """512 attempts: pickles, names of functions and classes, deep nests, sizes that are not there, and noise."""
    names = ["os:system", "builtins:eval", "subprocess:Popen", f"{__name__}:Evil", f"{__name__}:RAN.append", ":", "x"]
    hostile = [pickle.dumps(Evil()), b"", b"\0" * 8, message([["tensor"]] * 3)]
    hostile += [message({"~record": name, "values": ["id"], "with": None}) for name in names]
    hostile += [message({"~record": name, "fields": {"args": "id"}}) for name in names]
    hostile += [
        message({"~": "tensor", "key": "0"}, [["float32", shape]]) for shape in ([2**60], [-1], ["a"], [2**31] * 4)
    ]
    hostile += [(2**16).to_bytes(8, "little") + b"[" * 2**16, message({"~": "class", "v": "os.system"})]
    draw, good = random.Random(0), pack({"a": torch.ones(3), "b": Pair(1, [2])})
    while len(hostile) < 512:
        damaged = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        hostile.append(bytes(damaged[: draw.randint(0, len(damaged))]) if draw.random() < 0.3 else bytes(damaged))
    RAN.clear()
    refused = 0
    for data in hostile:
        try:
            unpack(data)
        except CheckpointError:
            refused += 1
    assert refused > 256
    assert RAN == []
