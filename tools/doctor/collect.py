"""Report of one machine: findings, versions and environment, each collected within a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from trainwright.core.processes.machine import machine_facts
from trainwright.tools.doctor import environment as env
from trainwright.tools.doctor import folders, machine, network
from trainwright.tools.doctor.finding import Finding, error
from trainwright.tools.doctor.machine import Demand

# Seconds per check: a file system or a name server that does not answer would block for ever.
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
    """Facts and findings of one machine.

    Args:
        host: name of the machine.
        findings: of checks that need no other machine.
        versions: name -> version of what must be the same on all machines.
        speed: bytes per second of the fastest interface; 0: unknown.
        environment: fields of `torch.utils.collect_env`.
    """

    host: str
    findings: list[Finding] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    speed: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)


def import_torch() -> list[Finding]:
    """Import torch, Lightning and the modules of a rank.

    Returns:
        A finding if an import fails or hangs, else nothing.
    """
    try:
        within(IMPORT_SECONDS, _import_everything)
    except Exception as failure:  # a broken environment can raise anything
        what = f"torch and Lightning cannot be imported: {failure or repr(failure)}"
        todo = "see python -c 'import torch, lightning'; put the environment on a local disk, or in an image"
        return [error(machine.AREA, "imports", what, "an environment that can be imported", todo)]
    return []


def _import_everything() -> None:
    import trainwright.launch.worker  # noqa: F401


def find_devices() -> tuple[list[Finding], env.DeviceFacts]:
    """Return the GPUs of this machine, and a finding if the driver does not answer."""
    found: list[Finding] = []
    return found, _guarded(found, "devices", env.DEVICES, env.device_facts, DEVICE_SECONDS) or env.DeviceFacts()


def report_host(host: str, run_dir: str, demand: Demand) -> HostReport:
    """Judge this machine except its devices. Imports torch, writes nothing.

    Args:
        host: name of the machine.
        run_dir: folder a run would write to; it need not exist.
        demand: what the run asks of this machine.
    """
    found: list[Finding] = []
    installed = env.installed_versions()
    checks: dict[str, tuple[str, Callable[[], list[Finding]]]] = {
        "machine": (machine.AREA, lambda: machine.judge_machine(machine_facts(), demand)),
        "run directory": (folders.AREA, lambda: [folders.judge_run_dir(run_dir)]),
        "shared memory": (folders.AREA, lambda: [folders.judge_shared_memory(*folders.shared_memory(), demand)]),
        "network": (network.AREA, lambda: network.judge_network(network.network_facts(), demand.hosts, demand.on_gpu)),
        "libraries": (env.LIBRARIES, lambda: env.judge_libraries(installed)),
    }
    for name, (area, check) in checks.items():
        found += _guarded(found, name, area, check) or []
    versions = _guarded(found, "versions", env.LIBRARIES, lambda: env.compared_versions(installed)) or {}
    speed = max((each.speed or 0.0 for each in network.interfaces() if each.up), default=0.0)
    environment = _guarded(found, "environment", env.LIBRARIES, env.environment, DEVICE_SECONDS) or {}
    return HostReport(host, found, versions, speed, environment)


def _guarded(
    findings: list[Finding], name: str, area: str, function: Callable[[], Any], seconds: float = SECONDS
) -> Any | None:
    try:
        return within(seconds, function)
    except Exception as failure:  # a broken machine can raise anything
        todo = _TODO.get(name, "look at the machine: /proc and /sys must answer")
        findings.append(error(area, f"{name} answers", str(failure) or repr(failure), "an answer", todo))
        return None


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return the result of a function called in a daemon thread.

    Args:
        seconds: time limit.
        function: keeps running if it exceeds the limit, without keeping the process alive.

    Raises:
        TimeoutError: if it takes longer.
        Exception: raised by the function.
    """
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(function())
        except Exception as failure:  # raised again by result()
            answer.set_exception(failure)

    threading.Thread(target=run, daemon=True).start()
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return answer.result()
