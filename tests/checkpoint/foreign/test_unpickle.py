"""Torch files read as data: plain values round-trip, and no code runs."""

import io
import pickle
import random
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.payload import forget_extension, old_torch_files, pickles, torch_file
from trainwright.checkpoint.foreign.unpickle import Inert, load_inert
from trainwright.core.errors import CheckpointError

NAMES = sorted(pickles(Path("x")))


@pytest.fixture
def touch(tmp_path):
    yield tmp_path / "touched"
    forget_extension()


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
    payloads = pickles(touch)
    for data in [torch_file(payloads["os.system, protocol 2"]), *old_torch_files(payloads["INST"]).values()]:
        _tried_by_torch(data)
        assert touch.exists()
        touch.unlink()


def _tried_by_torch(data: bytes) -> None:
    try:
        torch.load(io.BytesIO(data), weights_only=False)
    except Exception:
        return


def test_calls_become_inert(tmp_path, touch):
    path = tmp_path / "x.pt"
    path.write_bytes(torch_file(pickles(touch)["eval, protocol 2"]))
    value = load_inert(path)
    assert isinstance(value, Inert)
    assert (value.name, value.args) == ("builtins.eval", (f"open({str(touch)!r}, 'w').close()",))
    assert repr(value) == "<object of builtins.eval, not loaded>"


@pytest.mark.parametrize("name", ["os.system, protocol 2", "partial, protocol 2", "OBJ"])
def test_calls_without_inert_form_are_refused(tmp_path, touch, name):
    (tmp_path / "x.pt").write_bytes(torch_file(pickles(touch)[name]))
    with pytest.raises(CheckpointError, match=r"x\.pt (holds Python objects \(|has a pickle protocol)"):
        load_inert(tmp_path / "x.pt")


class Settings:
    def __init__(self) -> None:
        self.rate = 0.1
        self.weight = torch.ones(3)


class Numbers(list):
    pass


def test_objects_become_inert(tmp_path):
    allowed = set(torch.serialization.get_safe_globals())
    torch.save({"a": Settings(), "d": Settings}, tmp_path / "x.pt")
    value = load_inert(tmp_path / "x.pt")
    assert value["a"].name == f"{__name__}.Settings"
    assert value["a"].state["rate"] == 0.1
    assert torch.equal(value["a"].state["weight"], torch.ones(3))
    assert issubclass(value["d"], Inert)
    assert value["d"].name == f"{__name__}.Settings"
    torch.save({"c": Numbers([1, 2])}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="holds Python objects"):
        load_inert(tmp_path / "x.pt")
    assert set(torch.serialization.get_safe_globals()) == allowed


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
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "set": {1, (2, 3)},
        "bytes": b"abc\xff",
        "bytearray": bytearray(b"12"),
        "text": "Grüße\n",
        "none": None,
        "true": True,
        "complex number": 1j,
        "big": 2**100,
        "negative": -(2**40),
        "float": -0.5,
        "tuple": (1, (2, 3, 4, 5), ()),
        "ordered": OrderedDict(b=1, a=2),
        3: "a number as a key",
        (1, "a"): "a tuple as a key",
    }


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
def test_plain_values(tmp_path, is_zip):
    torch.save(plain(), tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    found, expected = load_inert(tmp_path / "x.pt"), plain()
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert_same(found[key], value, str(key))


def assert_same(found: Any, expected: Any, key: str) -> None:
    if isinstance(expected, Tensor):
        assert type(found) is type(expected), key
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected), key
    else:
        assert type(found) is type(expected), key
        assert found == expected, key


def test_dict_subclasses_and_newer_dtypes(tmp_path):
    torch.save([defaultdict(list, {1: [2]}), Counter("aab"), torch.ones(3, dtype=torch.uint16)], tmp_path / "x.pt")
    *found, tensor = load_inert(tmp_path / "x.pt")
    assert found == [{1: [2]}, {"a": 2, "b": 1}]
    assert type(found[0]) is dict
    assert tensor.dtype is torch.uint16


@pytest.mark.parametrize("protocol", [1, 4])
def test_other_protocols_are_refused(tmp_path, protocol):
    torch.save(plain(), tmp_path / "x.pt", pickle_protocol=protocol)
    with pytest.raises(CheckpointError, match=r"it supports 2.*pickle_protocol=2"):
        load_inert(tmp_path / "x.pt")


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


STORAGE = object()


class _Tensor:
    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, (STORAGE, 0, (1 << 20,), (0,), False, OrderedDict())


TENSOR = _Tensor()


def _with_object(value: Any) -> bytes:
    """A torch file of an object, whose ``STORAGE`` is a storage of four floats in the file."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 4) if item is STORAGE else None

    buffer, saved = io.BytesIO(), io.BytesIO()
    Pickler(buffer, 2).dump(value)
    torch.save({"a": torch.zeros(4)}, saved)
    return _with_pickle(saved.getvalue(), buffer.getvalue())


def _with_pickle(saved: bytes, data: bytes) -> bytes:
    """A torch file with another pickle, whose checksum is right."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved)) as old, zipfile.ZipFile(written, "w") as new:
        for name in old.namelist():
            new.writestr(name, data if name.endswith("data.pkl") else old.read(name))
    return written.getvalue()


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
def test_truncated_files_are_refused(tmp_path, is_zip):
    torch.save({"a": torch.arange(100), "b": [1, "x"]}, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    data = (tmp_path / "x.pt").read_bytes()
    for length in {*range(0, len(data), 37), len(data) - 1}:
        (tmp_path / "y.pt").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"y\.pt .*(is empty|damaged)"):
            load_inert(tmp_path / "y.pt")


@pytest.mark.parametrize("what", ["file", "old file", "pickle"])
def test_damaged_files_raise_checkpoint_errors(tmp_path, what):
    """Whatever bytes stand in a file: a value, or one kind of error."""
    torch.save(plain(), tmp_path / "x.pt", _use_new_zipfile_serialization=what != "old file")
    data = saved = (tmp_path / "x.pt").read_bytes()
    if what == "pickle":
        data = zipfile.ZipFile(io.BytesIO(saved)).read("x/data.pkl")
    generator = random.Random(1)
    refused = 0
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            changed[generator.randrange(min(len(data), 3000))] = generator.randrange(256)
        (tmp_path / "y.pt").write_bytes(_with_pickle(saved, bytes(changed)) if what == "pickle" else changed)
        refused += _tried(tmp_path / "y.pt") is None
    assert refused > 100


@pytest.mark.parametrize(("offset", "size", "stride"), [
    (1, (4,), (1,)), (0, (2, 2), (3, 1)), (-1, (2,), (1,)), (0, (-2, -2), (1, 1)), (0, (4,), (-1,)),
    (1 << 62, (4,), (1,)),
])  # fmt: skip
def test_tensors_outside_of_their_bytes_are_refused(tmp_path, offset, size, stride):
    class Wrong:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (STORAGE, offset, size, stride, False, OrderedDict())

    (tmp_path / "y.pt").write_bytes(_with_object(Wrong()))
    with pytest.raises(CheckpointError, match="damaged"):
        load_inert(tmp_path / "y.pt")


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
def test_absurd_pickles(tmp_path, payload):
    """Neither the process nor its memory ends; a value that is only odd may come out."""
    (tmp_path / "x.pt").write_bytes(torch_file(payload))
    _tried(tmp_path / "x.pt")


def reduced(function: str, *args: Any) -> bytes:
    """A pickle of a call by name; ``TENSOR`` among the arguments is a tensor of a million zeros, of one in the file."""

    class Called:
        def __reduce__(self) -> Any:
            return getattr(sys.modules[function.rpartition(".")[0]], function.rpartition(".")[2]), args

    return _with_object(Called())


@pytest.mark.parametrize(("function", "args", "text"), [
    ("builtins.bytearray", (1 << 31,), "arguments that are not text"),
    ("_codecs.encode", ("x" * 10, "punycode"), "arguments that are not text"),
    *[(f"collections.{name}", (TENSOR,), "items of another") for name in ("Counter", "OrderedDict")],
    ("collections.OrderedDict", ([TENSOR],), "items of another"),
    ("builtins.set", (TENSOR,), "items of another"),
    ("builtins.bytearray", (TENSOR,), "items of another"),
    ("torch._tensor._rebuild_from_type_v2", (set, set, (TENSOR,), {}), "tensor made by"),
    ("torch.Tensor", (1 << 29,), "tensors take 2.0 GiB"),
])  # fmt: skip
def test_calls_that_take_time_or_memory_are_refused(tmp_path, function, args, text):
    """Which torch's safe reader makes."""
    (tmp_path / "x.pt").write_bytes(reduced(function, *args))
    with pytest.raises(CheckpointError, match=text):
        load_inert(tmp_path / "x.pt")


def test_expanded_tensors_and_too_many_names_are_refused(tmp_path):
    torch.save({"a": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"tensors take 4\.0 TiB"):
        load_inert(tmp_path / "x.pt")
    names = b"".join(b"cx\nname%d\n" % number for number in range(1001))
    (tmp_path / "x.pt").write_bytes(torch_file(b"\x80\x02(" + names + b"t."))
    with pytest.raises(CheckpointError, match="names 1001 classes"):
        load_inert(tmp_path / "x.pt")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["archive/data.pkl", "archive/DATA.pkl", "other/data.pkl"])
def test_two_pickles_are_refused(tmp_path, name):
    """Torch could read the one that is not checked."""
    torch.save({"a": 1}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt", "a") as archive:
        archive.writestr(name.replace("archive", "x"), b"")
    with pytest.raises(CheckpointError, match="two records of one name"):
        load_inert(tmp_path / "x.pt")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text.pt").write_text("hello, world")
    with pytest.raises(CheckpointError, match=r"text\.pt \(12 bytes\) is not a torch file"):
        load_inert(tmp_path / "text.pt")
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "script.pt")
    with pytest.raises(CheckpointError, match="TorchScript"):
        load_inert(tmp_path / "script.pt")
    with pytest.raises(CheckpointError, match="Checkpoint file not found:"):
        load_inert(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="is a folder"):
        load_inert(tmp_path)
