import enum
import json
import threading
from collections import OrderedDict, namedtuple
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from trainwright.checkpoint.format.tree import UnsupportedValueError, decode, encode
from trainwright.core.text.bounded import ContentError


def round_trip(tree: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}

    def put(path: str, tensor: torch.Tensor) -> str:
        assert path not in tensors
        tensors[path] = tensor
        return path

    return decode(json.loads(json.dumps(encode(tree, put), allow_nan=False)), tensors.__getitem__)


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize("value", [
    *(None, True, 10**30, 0.1, float("-inf"), "ä\n~", b"\x00\xff", complex(1, float("inf")), Path("a/b"), dict),
    *({"~": "tensor", "key": "x"}, {1: "a", (2, 3): [4]}, (1, [2, (3,)]), {3, 1, 2}, frozenset({"a"})),
    *(OrderedDict([("b", 1), ("a", 2)]), datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)),
    *(timedelta(days=-1, microseconds=1), torch.float16, torch.device("cuda", 1), torch.Size([2, 3])),
    *(np.float32(0.1), np.int8(-3)),
], ids=repr)  # fmt: skip
def test_plain_values_round_trip(value):
    found = round_trip({"x": value})["x"]
    assert found == value
    assert type(found) is type(value) or isinstance(value, Path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_tensors_without_dimensions_keep_value_and_dtype(dtype):
    value = torch.tensor(1.1).to(dtype)
    found = round_trip(value)
    assert found.dtype == dtype
    assert torch.equal(found, value)


def test_tensors_and_arrays_are_kept_under_their_path():
    tree = {"a": {"b": [torch.arange(3)]}, "n": np.arange(4.0).reshape(2, 2), "s": np.array(2)}
    found = round_trip(tree)
    assert torch.equal(found["a"]["b"][0], torch.arange(3))
    assert np.array_equal(found["n"], tree["n"])
    assert found["s"].dtype == tree["s"].dtype
    assert found["s"] == 2


def test_configurations_have_values_and_refer_to_nothing():
    found = round_trip(OmegaConf.create({"a": "${b}", "b": [1], "c": "${oc.env:HOME}", "d": "${nowhere}"}))
    expected = {"a": [1], "b": [1], "c": "${oc.env:HOME}", "d": "${nowhere}"}
    assert OmegaConf.to_container(found, resolve=True) == expected


def test_enum_members_and_nan():
    assert type(round_trip(Colour.RED)) is int
    assert np.isnan(round_trip([float("nan")])[0])


@pytest.mark.parametrize("value", [
    object(), threading.Lock(), print, namedtuple("P", "x")(1), np.array([object()]), Colour,
], ids=["object", "lock", "function", "namedtuple", "array of objects", "class"])  # fmt: skip
def test_unsupported_values_are_named_by_path(value):
    with pytest.raises(UnsupportedValueError, match="callbacks/Mine/1/x is a .*state_dict"):
        round_trip({"callbacks": {"Mine": [0, {"x": value}]}})


@pytest.mark.parametrize("value", [
    {"~": "os.system", "v": "id"},
    {"~": "class", "v": "builtins.eval"},
    {"~": "dtype", "v": "load"},
    {"~": "dict", "v": [[[1], 2]]},
    {"~": "tensor"},
    {"~": "scalar", "dtype": "float32"},
    {"~": ["unhashable"], "v": 1},
], ids=repr)  # fmt: skip
def test_a_file_can_name_nothing_but_plain_data(value):
    with pytest.raises(ContentError):
        decode({"x": value}, lambda key: key)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner) | st.sets(PLAIN)
    ),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_any_tree_round_trips(tree):
    assert round_trip(tree) == tree
