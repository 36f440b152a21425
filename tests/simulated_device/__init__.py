"""A device in host memory whose tensors do not mix with those of the CPU, so that code which would fail on a GPU fails.

``load`` registers it with torch as ``simulated``; it compiles ``device.cpp`` at the first time, which needs a C++
compiler and ninja (``pip install ninja``), and takes a minute.
"""

from __future__ import annotations

import contextlib
import re
import types
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

NAME = "simulated"
_SOURCE = Path(__file__).with_name("device.cpp")
_BUILD = Path(__file__).parents[2] / "build" / "simulated_device"


def compiled() -> Path:
    """Compile the extension, unless that was done for this source and this torch."""
    name = re.sub(r"\W", "_", f"simulated_device_{torch.__version__}")
    library = _BUILD / f"{name}.so"
    if not library.exists() or library.stat().st_mtime < _SOURCE.stat().st_mtime:
        from torch.utils.cpp_extension import load as compile_and_load

        _BUILD.mkdir(parents=True, exist_ok=True)
        compile_and_load(name, [str(_SOURCE)], ["-O1", "-w"], build_directory=str(_BUILD))
    return library


@cache
def load() -> None:
    """Register the device in this process."""
    library = compiled()
    found = spec_from_file_location(library.stem, library)
    assert found is not None
    assert found.loader is not None
    extension: Any = module_from_spec(found)
    found.loader.exec_module(extension)
    extension.register_hooks()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # Lightning's and this package's code for GPUs asks torch.cuda.
    for name in ("Stream", "stream", "current_stream", "current_device", "synchronize"):
        patch.object(torch.cuda, name, getattr(_module(), name)).start()
    patch("torch.cuda.nccl.version", return_value=(2, 28, 9)).start()


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event(torch.Event):
    def __new__(cls, *_: Any, **__: Any) -> _Event:
        return super().__new__(cls, device=NAME)

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


@cache
def _module() -> types.ModuleType:
    """Return what ``torch.simulated`` is; everything happens at once, on one stream."""
    module, only = types.ModuleType(f"torch.{NAME}"), _Stream()
    module.__dict__.update(
        Stream=_Stream,
        Event=_Event,
        stream=lambda stream: contextlib.nullcontext(stream),
        current_stream=lambda device=None: only,
        default_stream=lambda device=None: only,
        set_stream=lambda stream: None,
        synchronize=lambda device=None: None,
        device=lambda device: contextlib.nullcontext(),
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.random.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.random.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        empty_cache=lambda: None,
        memory_allocated=lambda device=None: 0,
        memory_stats=lambda device=None: {},
    )
    return module
