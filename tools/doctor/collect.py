"""All facts of one machine, each kind within a time limit, as JSON for the rank that judges."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from trainwright.tools.doctor.devices import DeviceFacts, Gpu, device_facts
from trainwright.tools.doctor.libraries import LibraryFacts, library_facts
from trainwright.tools.doctor.limits import (
    FolderFacts,
    LimitFacts,
    SharedMemoryFacts,
    folder_facts,
    limit_facts,
    shared_memory_facts,
)
from trainwright.tools.doctor.machine import MachineFacts, machine_facts
from trainwright.tools.doctor.network import Interface, NetworkFacts, network_facts

# Seconds that each kind of facts may take: a file system or a name server that does not answer takes for ever.
SECONDS = 20.0
IMPORT_SECONDS = 180.0
DEVICE_SECONDS = 60.0


@dataclass(frozen=True)
class HostFacts:
    """What is known of a machine; ``None`` for what could not be found out within its time.

    Args:
        host: its name.
        unanswered: kind of facts -> why there are none.
        import_seconds: that importing torch and Lightning took.
    """

    host: str
    machine: MachineFacts | None = None
    limits: LimitFacts | None = None
    run_dir: FolderFacts | None = None
    tmp: FolderFacts | None = None
    shared_memory: SharedMemoryFacts | None = None
    network: NetworkFacts | None = None
    libraries: LibraryFacts | None = None
    devices: DeviceFacts | None = None
    import_seconds: float | None = None
    unanswered: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """For the rank that judges."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> HostFacts:
        """What :meth:`to_json` wrote; plain values alone, so nothing in it can run."""
        values: dict[str, Any] = json.loads(text)
        kinds: dict[str, Callable[..., Any]] = {
            "machine": MachineFacts,
            "limits": _limits,
            "run_dir": FolderFacts,
            "tmp": FolderFacts,
            "shared_memory": SharedMemoryFacts,
            "network": _network,
            "libraries": LibraryFacts,
            "devices": _devices,
        }
        for name, kind in kinds.items():
            if values[name] is not None:
                values[name] = kind(**values[name])
        return HostFacts(**values)


def _limits(**values: Any) -> LimitFacts:
    plain: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in values.items()}
    return LimitFacts(**plain)


def _network(**values: Any) -> NetworkFacts:
    return NetworkFacts(**{**values, "interfaces": [Interface(**each) for each in values["interfaces"]]})


def _devices(**values: Any) -> DeviceFacts:
    xids = values["xids"]
    return DeviceFacts(
        **{
            **values,
            "gpus": [Gpu(**each) for each in values["gpus"]],
            "xids": None if xids is None else [(bus, number) for bus, number in xids],
        }
    )


def collect(host: str, run_dir: str) -> HostFacts:
    """Everything about this machine; leaves nothing behind.

    Args:
        host: its name.
        run_dir: folder that a run would write to; it need not exist.
    """
    found: dict[str, Any] = {}
    unanswered: dict[str, str] = {}

    def look(name: str, function: Callable[[], Any], seconds: float = SECONDS) -> None:
        try:
            found[name] = within(seconds, function)
        except Exception as failure:  # whatever a machine that is not well raises
            unanswered[name] = str(failure) or repr(failure)

    look("machine", machine_facts)
    look("limits", limit_facts)
    look("run_dir", lambda: folder_facts(run_dir))
    look("tmp", lambda: folder_facts(tempfile.gettempdir()))
    look("shared_memory", shared_memory_facts)
    look("network", network_facts)
    look("import_seconds", _import_everything, IMPORT_SECONDS)
    look("libraries", library_facts)
    if "import_seconds" in found:
        installed = found["libraries"].installed if "libraries" in found else {}
        look("devices", lambda: device_facts(installed), DEVICE_SECONDS)
    return HostFacts(host=host, unanswered=unanswered, **found)


def _import_everything() -> float:
    begin = time.perf_counter()
    import trainwright.launch.worker  # noqa: F401 - torch, Lightning and all that a rank uses

    return time.perf_counter() - begin


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """What a function returns, if it does so in time.

    Args:
        seconds: limit.
        function: goes on in a thread that keeps no process alive if it does not end.

    Raises:
        TimeoutError: if it takes longer.
        Exception: whatever it raises.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = function()
        except Exception as failure:  # raised again where the answer is waited for
            outcome["failure"] = failure

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if "failure" in outcome:
        raise outcome["failure"]
    if "value" not in outcome:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return outcome["value"]
