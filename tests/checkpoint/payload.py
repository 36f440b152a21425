"""Pickles that touch a file if anything in them runs, for every way to run code from a pickle."""

import copyreg
import functools
import io
import operator
import os
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

_EXTENSION = 240


class Call:
    """Pickles as a call of a function, or of the result of another call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function = function
        self._args = args

    def __reduce__(self) -> Any:
        return self._function, self._args

    def __call__(self) -> None:
        """The pickler requires a callable."""


def evil(touch: Path) -> Any:
    """Return an object that touches a file when unpickled."""
    return Call(os.system, f"touch {touch}")


def pickles(touch: Path) -> dict[str, bytes]:
    """Pickles by name; :func:`pickle.loads` of any of them makes the file ``touch``."""
    found = {}
    for name, value in _objects(touch).items():
        for protocol in (0, 2, 4):
            found[f"{name}, protocol {protocol}"] = pickle.dumps(value, protocol)
    return found | _by_hand(f"touch {touch}".encode())


def forget_extension() -> None:
    """Undo the effect of one of the pickles."""
    with suppress(ValueError):
        copyreg.remove_extension("os", "system", _EXTENSION)


def _objects(touch: Path) -> dict[str, Any]:
    command = f"touch {touch}"
    run = f"open({str(touch)!r}, 'w').close()"
    system = Call(getattr, Call(__import__, "os"), "system")
    inner = Call(exec, run)
    torch_load = functools.partial(torch.load, weights_only=False)
    return {
        "os.system": Call(os.system, command),
        "eval": Call(eval, run),
        "exec": inner,
        "partial": Call(Call(functools.partial, exec, run)),
        "attrgetter": Call(Call(Call(operator.attrgetter, "system"), Call(__import__, "os")), command),
        "methodcaller": Call(Call(operator.methodcaller, "system", command), Call(__import__, "os")),
        "getattr": Call(system, command),
        "map": Call(list, Call(map, exec, [run])),
        "reduce": Call(functools.reduce, exec, [run, {}]),
        "pickle in it": Call(pickle.loads, pickle.dumps(inner)),
        "torch file in it": Call(torch_load, Call(io.BytesIO, _torch_bytes(inner))),
        "numpy file in it": Call(np.load, Call(io.BytesIO, _numpy_bytes(inner)), None, True),
        "key of a dict": {inner: 1},
        "deep inside": {"state_dict": [{"a": (1, inner)}]},
    }


def _by_hand(command: bytes) -> dict[str, bytes]:
    """Instructions that no pickler writes, but that the unpickler knows."""
    text = b"S'" + command + b"'\n"
    namespace = b"ctypes\nSimpleNamespace\n)R}S'%s'\ncos\nsystem\nsb"
    extension = (
        b"ccopyreg\nadd_extension\n(S'os'\nS'system'\nK" + bytes([_EXTENSION]) + b"tR0\x82" + bytes([_EXTENSION])
    )
    return {
        "INST": b"(" + text + b"ios\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + text + b"o.",
        "STACK_GLOBAL": b"\x80\x04S'os'\nS'system'\n\x93(" + text + b"tR.",
        "__setstate__ as state": namespace % b"__setstate__" + text + b"b.",
        "__setstate__ of a new object": b"cargparse\nNamespace\n)\x81}S'__setstate__'\ncos\nsystem\nsb" + text + b"b.",
        "append as state": namespace % b"append" + text + b"a.",
        "extend as state": namespace % b"append" + b"(" + text + b"e.",
        "add as state": b"\x80\x04" + namespace % b"add" + b"(" + text + b"\x90.",
        "registered extension": b"\x80\x02" + extension + b"(" + text + b"tR.",
    }


def torch_file(payload: bytes) -> bytes:
    """A file of ``torch.save`` in which a pickle stands."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def old_torch_files(payload: bytes) -> dict[str, bytes]:
    """Files as ``torch.save`` wrote before zip archives, the pickle in each place where there is one."""
    parts = {
        "magic number": pickle.dumps(0x1950A86A20F9469CFC6C, 2),
        "version": pickle.dumps(1001, 2),
        "system": pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2),
        "object": pickle.dumps({"a": 1}, 2),
        "storages": pickle.dumps([], 2),
    }
    return {name: b"".join({**parts, name: payload}.values()) for name in parts}


def _torch_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _numpy_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([value], dtype=object), allow_pickle=True)
    return buffer.getvalue()
