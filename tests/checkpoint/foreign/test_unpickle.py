"""Torch files read as data: what is plain comes out whole, and nothing runs."""

from __future__ import annotations

import argparse
import io
import pickle
import random
import types
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.payload import forget_extension, old_torch_files, pickles, torch_file
from trainwright.checkpoint.foreign.pickle_machine import Inert
from trainwright.checkpoint.foreign.unpickle import load_inert
from trainwright.core.errors import CheckpointError

NAMES = sorted(pickles(Path("x")))


@pytest.fixture
def touch(tmp_path):
    yield tmp_path / "touched"
    forget_extension()


# ---- nothing runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_nothing_runs(tmp_path, touch, name):
    payload = pickles(touch)[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *args: None)
        _unpickled(payload)
    assert touch.exists(), "this pickle runs nothing even where it could: it proves nothing"
    forget_extension()
    touch.unlink()
    files = {"zip": torch_file(payload), **old_torch_files(payload)}
    for place, data in files.items():
        path = tmp_path / f"{place}.pt"
        path.write_bytes(data)
        _tried(path)
        assert not touch.exists(), f"{name} ran, in place of {place}"


def _unpickled(payload: bytes) -> None:
    try:
        pickle.loads(payload)
    except Exception:
        return


def _tried(path: Path) -> Any:
    try:
        return load_inert(path)
    except CheckpointError:
        return None


def test_payloads_run_in_torch_files(tmp_path, touch):
    """Or the test above would prove nothing of files."""
    for data in [
        torch_file(pickles(touch)["os.system, protocol 2"]),
        *old_torch_files(pickles(touch)["INST"]).values(),
    ]:
        _tried_by_torch(data)
        assert touch.exists()
        touch.unlink()


def _tried_by_torch(data: bytes) -> None:
    try:
        torch.load(io.BytesIO(data), weights_only=False)
    except Exception:
        return


def test_calls_are_kept_as_records(tmp_path, touch):
    path = tmp_path / "x.pt"
    path.write_bytes(torch_file(pickles(touch)["os.system, protocol 2"]))
    value = load_inert(path)
    assert isinstance(value, Inert)
    assert (value.name, value.args) == ("posix.system", (f"touch {touch}",))
    assert repr(value) == "<object of posix.system, not loaded>"
    path.write_bytes(torch_file(pickles(touch)["partial, protocol 4"]))
    called = load_inert(path)
    assert (called.name, called.args) == ("functools.partial()", ())


class Settings:
    def __init__(self) -> None:
        self.rate = 0.1
        self.weight = torch.ones(3)


class Words(dict):
    pass


class Numbers(list):
    pass


def test_objects_are_kept_as_records(tmp_path):
    torch.save({"a": Settings(), "b": Words(x=1), "c": Numbers([1, 2]), "d": Settings}, tmp_path / "x.pt")
    value = load_inert(tmp_path / "x.pt")
    assert value["a"].name == f"{__name__}.Settings"
    assert value["a"].state["rate"] == 0.1
    assert torch.equal(value["a"].state["weight"], torch.ones(3))
    assert value["b"].entries == {"x": 1}
    assert value["c"].items == [1, 2]
    assert value["d"].args is None
    assert repr(value["d"]) == f"<{__name__}.Settings, not loaded>"


# ---- what is plain comes out whole -----------------------------------------------------------------------------------


def plain() -> dict[str, Any]:
    x = torch.arange(12.0).reshape(3, 4)
    return {
        "tensor": x,
        "view": x[1:, ::2],
        "transposed": x.t(),
        "expanded": torch.ones(1, 3).expand(2, 3),
        "bfloat16": x.bfloat16(),
        "half": x.half(),
        "bool": x > 3,
        "complex": x + 1j,
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "parameter": nn.Parameter(x),
        "array": np.arange(6).reshape(2, 3),
        "array by columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "array, big end first": np.arange(3, dtype=">f4"),
        "number of numpy": np.float32(2.5),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "set": {1, (2, 3)},
        "frozenset": frozenset("ab"),
        "bytes": b"abc\xff",
        "bytearray": bytearray(b"12"),
        "complex number": 1j,
        "big": 2**100,
        "negative": -(2**40),
        "float": -0.5,
        "text": "Grüße\n",
        "tuple": (1, (2, 3, 4, 5), ()),
        "ordered": OrderedDict(b=1, a=2),
        "none": None,
        "true": True,
        3: "a number as a key",
        (1, "a"): "a tuple as a key",
    }


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
def test_plain_values(tmp_path, protocol, is_zip):
    torch.save(plain(), tmp_path / "x.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    found, expected = load_inert(tmp_path / "x.pt"), plain()
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert_same(found[key], value, str(key))


def assert_same(found: Any, expected: Any, key: str) -> None:
    if isinstance(expected, Tensor):
        assert type(found) is Tensor, key
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected), key
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype.newbyteorder("=")
        assert np.array_equal(found, expected)
        assert found.flags.f_contiguous == expected.flags.f_contiguous
    else:
        assert type(found) is type(expected), key
        assert found == expected, key


def test_newer_dtypes(tmp_path):
    value = {"u16": torch.ones(3, dtype=torch.uint16), "f8": torch.ones(3).to(torch.float8_e4m3fn)}
    torch.save(value, tmp_path / "x.pt")
    found = load_inert(tmp_path / "x.pt")
    assert found["u16"].dtype is torch.uint16
    assert torch.equal(found["f8"].float(), torch.ones(3))


def test_namespaces_are_dicts(tmp_path):
    values = [
        argparse.Namespace(a=1, __setstate__=2),
        types.SimpleNamespace(a=1),
        defaultdict(list, {1: [2]}),
        Counter("aab"),
    ]
    torch.save(values, tmp_path / "x.pt")
    found = load_inert(tmp_path / "x.pt")
    assert found == [{"a": 1, "__setstate__": 2}, {"a": 1}, {1: [2]}, {"a": 2, "b": 1}]
    assert {type(value) for value in found} == {dict}


def test_state_dicts_keep_the_versions_of_modules(tmp_path):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    torch.save(module.state_dict(), tmp_path / "x.pt")
    found = load_inert(tmp_path / "x.pt")
    assert found._metadata == module.state_dict()._metadata
    nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).load_state_dict(found)


def test_shared_memory_stays_shared(tmp_path):
    x = torch.zeros(4)
    torch.save({"a": x, "b": x[2:]}, tmp_path / "x.pt")
    found = load_inert(tmp_path / "x.pt")
    found["a"].fill_(1)
    assert found["b"].tolist() == [1, 1]
    # The file is mapped for reading alone.
    assert load_inert(tmp_path / "x.pt")["b"].tolist() == [0, 0]


def test_values_that_mean_something_else_are_refused(tmp_path):
    torch.save({"a": torch.ones(3, dtype=torch.complex64).conj()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="conj"):
        load_inert(tmp_path / "x.pt")


def test_remote_files():
    import fsspec

    buffer = io.BytesIO()
    torch.save({"a": torch.arange(5)}, buffer)
    with fsspec.open("memory://unpickle/x.pt", "wb") as file:
        file.write(buffer.getvalue())
    assert load_inert("memory://unpickle/x.pt")["a"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointError, match="Checkpoint file not found: memory://unpickle/y.pt"):
        load_inert("memory://unpickle/y.pt")


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
def test_truncated_files_are_refused(tmp_path, is_zip):
    torch.save({"a": torch.arange(100), "b": [1, "x"]}, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    data = (tmp_path / "x.pt").read_bytes()
    for length in {*range(0, len(data), 37), len(data) - 1}:
        (tmp_path / "y.pt").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"y\.pt .*(is empty|damaged)"):
            load_inert(tmp_path / "y.pt")


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
def test_damaged_files_raise_nothing_else(tmp_path, is_zip):
    """Whatever bytes stand in a file: a value, or one kind of error."""
    torch.save(plain(), tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    data = (tmp_path / "x.pt").read_bytes()
    generator = random.Random(1)
    refused = 0
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            changed[generator.randrange(min(len(data), 3000))] = generator.randrange(256)
        (tmp_path / "y.pt").write_bytes(changed)
        refused += _tried(tmp_path / "y.pt") is None
    assert refused > 100


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (1, (4,), (1,)),
        (0, (2, 2), (3, 1)),
        (-1, (2,), (1,)),
        (0, (-2, -2), (1, 1)),
        (0, (4,), (-1,)),
        (1 << 62, (4,), (1,)),
    ],
)
def test_tensors_outside_of_their_bytes_are_refused(tmp_path, offset, size, stride):
    torch.save({"a": torch.zeros(4)}, tmp_path / "x.pt")

    class Wrong:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (STORAGE, offset, size, stride, False, OrderedDict())

    archive = _with_object(tmp_path / "x.pt", Wrong())
    (tmp_path / "y.pt").write_bytes(archive)
    with pytest.raises(CheckpointError, match=r"shape is none|outside its 16 bytes"):
        load_inert(tmp_path / "y.pt")


STORAGE = object()


def _with_object(path: Path, value: Any) -> bytes:
    """The file with another object, whose ``STORAGE`` is the storage of four floats in the file."""
    import zipfile

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 4) if item is STORAGE else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(value)
    written = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(written, "w") as new:
        for name in old.namelist():
            new.writestr(name, buffer.getvalue() if name.endswith("data.pkl") else old.read(name))
    return written.getvalue()


@pytest.mark.parametrize(
    "payload",
    [
        b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
        b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s.",
        b"\x80\x02]q\x00h\x00a.",
        b"\x80\x02" + b"cbuiltins\nbytearray\n(L99999999999999L\ntR.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x02X\xff\xff\xff\xffabc.",
        b"\x80\x02h\x07.",
        b"\x80\x020.",
        b"",
    ],
    ids=["deep", "deep key", "itself", "many bytes", "long number", "long text", "no memo", "empty stack", "nothing"],
)
def test_absurd_pickles_end_well(tmp_path, payload):
    """Neither the process nor its memory ends; a value that is only odd may come out."""
    (tmp_path / "x.pt").write_bytes(torch_file(payload))
    _tried(tmp_path / "x.pt")


def test_what_is_no_torch_file(tmp_path):
    (tmp_path / "text.pt").write_text("hello, world")
    with pytest.raises(CheckpointError, match=r"text\.pt \(12 bytes\) is no torch file"):
        load_inert(tmp_path / "text.pt")
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "script.pt")
    with pytest.raises(CheckpointError, match="TorchScript"):
        load_inert(tmp_path / "script.pt")
    with pytest.raises(CheckpointError, match="Checkpoint file not found:"):
        load_inert(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="is a folder"):
        load_inert(tmp_path)
