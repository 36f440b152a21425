"""What one machine reports: its findings, versions and environment, each within a time limit."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from typing import Any

from trainwright.core.processes.machine import machine_facts
from trainwright.core.text.plain import rebuilt
from trainwright.tools.doctor import environment as env
from trainwright.tools.doctor import folders, machine, network
from trainwright.tools.doctor.finding import Finding, error
from trainwright.tools.doctor.machine import Demand

# Seconds that each look may take: a file system or a name server that does not answer takes for ever.
SECONDS = 20.0
IMPORT_SECONDS = 180.0
DEVICE_SECONDS = 60.0
_TODO = {
    "run directory": "look at the file system of run_dir= (a network file system that does not answer?)",
    "network": "look at the name server: getent hosts $(hostname) must answer at once",
    "devices": "look at the driver: nvidia-smi must answer",
}


@dataclass(frozen=True)
class HostReport:
    """What is known of a machine.

    Args:
        host: its name.
        findings: of checks that need no other machine.
        versions: that must be the same on all machines; name -> version.
        speed: bytes per second of its fastest interface; 0: unknown.
        environment: fields of `torch.utils.collect_env`.
    """

    host: str
    findings: list[Finding] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    speed: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return this report as text for the rank that reports all."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> HostReport:
        """Return what :meth:`to_json` wrote; plain values alone, so nothing in it can run."""
        report: HostReport = rebuilt(HostReport, json.loads(text))
        return report


def import_torch() -> list[Finding]:
    """Import torch, Lightning and what a rank uses.

    Returns:
        What keeps them from being imported; empty: nothing.
    """
    try:
        within(IMPORT_SECONDS, _import_everything)
    except Exception as failure:  # whatever a broken environment raises
        what = f"torch and Lightning cannot be imported: {failure or repr(failure)}"
        todo = "python -c 'import torch, lightning' shows more; put the environment on a local disk, or in an image"
        return [error(machine.AREA, "imports", what, "an environment that can be imported", todo)]
    return []


def _import_everything() -> None:
    import trainwright.launch.worker  # noqa: F401


def look_at_devices() -> tuple[list[Finding], env.DeviceFacts]:
    """Return the GPUs of this machine, and a finding if the driver does not answer."""
    found: list[Finding] = []
    return found, _look(found, "devices", env.DEVICES, env.device_facts, DEVICE_SECONDS) or env.DeviceFacts()


def report_host(host: str, run_dir: str, demand: Demand) -> HostReport:
    """Judge this machine but for its devices; torch is imported, and nothing is left behind.

    Args:
        host: its name.
        run_dir: folder that a run would write to; it need not exist.
        demand: of the run.
    """
    found: list[Finding] = []
    installed = env.installed_versions()
    checks: dict[str, tuple[str, Callable[[], list[Finding]]]] = {
        "machine": (machine.AREA, lambda: machine.judge_machine(machine_facts(), demand)),
        "run directory": (folders.AREA, lambda: [folders.judge_run_dir(run_dir)]),
        "shared memory": (folders.AREA, lambda: [folders.judge_shared_memory(*folders.shared_memory(), demand)]),
        "network": (
            network.AREA,
            lambda: network.judge_network(network.network_facts(), demand.hosts, demand.on_gpu),
        ),
        "libraries": (env.LIBRARIES, lambda: env.judge_libraries(installed)),
    }
    for name, (area, check) in checks.items():
        found += _look(found, name, area, check) or []
    versions = _look(found, "versions", env.LIBRARIES, lambda: env.compared_versions(installed)) or {}
    speed = max((each.speed or 0.0 for each in network.interfaces() if each.up), default=0.0)
    environment = _look(found, "environment", env.LIBRARIES, env.environment, DEVICE_SECONDS) or {}
    return HostReport(host, found, versions, speed, environment)


def _look(
    findings: list[Finding], name: str, area: str, function: Callable[[], Any], seconds: float = SECONDS
) -> Any | None:
    try:
        return within(seconds, function)
    except Exception as failure:  # whatever a broken machine raises
        todo = _TODO.get(name, "look at the machine: /proc and /sys must answer")
        findings.append(error(area, f"{name} answers", str(failure) or repr(failure), "an answer", todo))
        return None


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return what a function returns, if it does so in time.

    Args:
        seconds: limit.
        function: runs on in a thread that keeps no process alive if it does not end.

    Raises:
        TimeoutError: if it takes longer.
        Exception: whatever it raises.
    """
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(function())
        except Exception as failure:  # raised again where the answer is waited for
            answer.set_exception(failure)

    threading.Thread(target=run, daemon=True).start()
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return answer.result()
