"""Checks of installed versions and GPUs; the rest of the environment is reported by `torch.utils.collect_env`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from trainwright.tools.doctor.finding import Finding, error, ok
from trainwright.tools.doctor.machine import Demand

LIBRARIES, DEVICES = "libraries", "devices"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Uploaded through a stolen account (April 2026): importing them exfiltrates secrets of the machine.
_COMPROMISED = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
_COMPARED = ("torch", "lightning", "numpy", "trainwright")
_SHOWN = {
    "os": "OS",
    "python_version": "Python",
    "torch_version": "torch",
    "cuda_compiled_version": "CUDA of torch",
    "hip_compiled_version": "ROCm of torch",
    "cuda_runtime_version": "CUDA installed",
    "nvidia_driver_version": "driver",
    "cudnn_version": "cuDNN",
    "nvidia_gpu_models": "GPUs",
    "pip_packages": "packages",
}


def environment() -> dict[str, Any]:
    """Return the fields of `torch.utils.collect_env` as plain values."""
    from torch.utils import collect_env

    found: dict[str, Any] = collect_env.get_env_info()._asdict()
    return found


def environment_lines(fields: Mapping[str, Any]) -> list[str]:
    """Return the printed lines of an environment: versions, CUDA, driver, GPUs and the CPU.

    Args:
        fields: as returned by :func:`environment`.
    """
    lines = [
        f"{title}: {', '.join(str(fields[name]).splitlines())}"
        for name, title in _SHOWN.items()
        if fields.get(name) not in (None, "", "N/A")
    ]
    about_cpu = str(fields.get("cpu_info")).splitlines()
    return lines + [f"CPU: {line.split(':')[1].strip()}" for line in about_cpu if line.startswith("Model name:")]


# ---------------------------------------------------------------------------------------------------------------------
# Libraries


def installed_versions() -> dict[str, str]:
    """Return the installed versions of compared distributions and of those with malicious releases."""
    versions = {}
    for name in sorted({*_COMPARED, *_COMPROMISED}):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def judge_libraries(installed: Mapping[str, str]) -> list[Finding]:
    """Find malicious releases; `pip check` covers incompatible versions."""
    return [
        error(
            LIBRARIES,
            "compromised release",
            f"{name} {installed[name]}, a malicious upload that reads credentials when it is imported",
            "2.6.4 or newer",
            "pip install 'lightning>=2.6.4,<2.7', and change every password, key and token that this machine could "
            f"read ({name} may have been imported already)",
        )
        for name, versions in _COMPROMISED.items()
        if installed.get(name) in versions
    ]


def compared_versions(installed: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that must be equal on all machines. Imports torch.

    Args:
        installed: distribution -> version.
    """
    import torch

    has_nccl = torch.version.cuda is not None and torch.distributed.is_nccl_available()
    return {
        "python": sys.version.split()[0],
        **{name: installed.get(name, "none") for name in _COMPARED},
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none",
    }


def judge_same(by_host: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Compare versions across machines; ranks of different versions may compute or communicate differently.

    Args:
        by_host: host -> name -> version, as returned by :func:`compared_versions`.
    """
    if len(by_host) < 2:
        return []
    found = []
    for name in dict.fromkeys(name for versions in by_host.values() for name in versions):
        hosts: dict[str, list[str]] = {}
        for host, versions in by_host.items():
            hosts.setdefault(versions.get(name, "none"), []).append(host)
        if len(hosts) > 1:
            what = "; ".join(f"{version} on {', '.join(names)}" for version, names in hosts.items())
            todo = "install the same versions everywhere: pip install -c constraints.txt, or use one image"
            found.append(error(LIBRARIES, f"{name} everywhere", f"{name} differs: {what}", "one version", todo))
    return found or [ok(LIBRARIES, "same everywhere", f"{len(by_host)} machines have the same versions")]


# ---------------------------------------------------------------------------------------------------------------------
# GPUs


@dataclass(frozen=True)
class DeviceFacts:
    """GPUs of one machine.

    Attributes:
        files: number of the driver's device files.
        usable: number of GPUs torch can use.
        built_for: CUDA or ROCm version of the torch build; empty: none.
        torch_says: warnings raised by torch during detection.
        visible: ``CUDA_VISIBLE_DEVICES``; ``None``: not set.
    """

    files: int = 0
    usable: int = 0
    built_for: str = ""
    torch_says: str = ""
    visible: str | None = None


def device_facts() -> DeviceFacts:
    """Return the GPUs of this machine. Imports torch, creates no CUDA context."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return DeviceFacts(
        files=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        usable=usable,
        built_for=torch.version.cuda or torch.version.hip or "",
        torch_says="; ".join(str(each.message).splitlines()[0] for each in said),
        visible=os.environ.get(VISIBLE),
    )


def judge_devices(facts: DeviceFacts, demand: Demand, accelerator: str = "auto") -> Finding:
    """Check that a run finds the GPUs it asks for."""
    there = max(facts.files, facts.usable)
    if accelerator == "cpu" or (accelerator == "auto" and not there):
        return ok(DEVICES, "accelerator", "ranks compute on the CPU")
    if not facts.usable:
        return _unusable(facts, there)
    found = f"{facts.usable} of {there} GPUs that torch can use"
    found += f" ({VISIBLE}={facts.visible})" if facts.visible is not None else ""
    if demand.ranks > facts.usable:
        todo = f"devices={facts.usable}" + (f", or correct {VISIBLE}" if facts.visible is not None else "")
        return error(DEVICES, "GPUs", f"{found}, for {demand.ranks} ranks", "one GPU per rank", todo)
    return ok(DEVICES, "GPUs", found)


def _unusable(facts: DeviceFacts, there: int) -> Finding:
    if not there:
        what, todo = "there is no GPU (no /dev/nvidia*)", "accelerator=cpu, or docker run --gpus all"
    elif not facts.built_for:
        what = f"{there} GPUs, but torch is built without CUDA"
        todo = "install a CUDA build of the same torch (see pytorch.org/get-started), or type accelerator=cpu"
    elif facts.visible is not None and facts.visible.strip() in ("", "-1"):
        what, todo = f"{VISIBLE}={facts.visible!r} hides all GPUs", f"unset {VISIBLE}"
    else:
        what = f"torch can use none of {there} GPUs: {facts.torch_says or 'no reason given'}"
        todo = (
            "nvidia-smi must answer; then check dmesg, the fabric manager (systemctl status nvidia-fabricmanager) and "
            "the container's runtime (docker run --gpus all)"
        )
    return error(DEVICES, "GPUs", what, "GPUs that torch can use", todo)
