"""What is installed, and whether torch can use the GPUs; the rest is what `torch.utils.collect_env` reports."""

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
# Uploaded through a stolen account (April 2026): importing them sends secrets of the machine away.
_COMPROMISED = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
_SAME_EVERYWHERE = ("torch", "lightning", "numpy", "trainwright")
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
    """Return the fields of `torch.utils.collect_env`, as plain values."""
    from torch.utils import collect_env

    found: dict[str, Any] = collect_env.get_env_info()._asdict()
    return found


def environment_lines(fields: Mapping[str, Any]) -> list[str]:
    """Return the lines to print of an environment: versions, CUDA, driver, GPUs and the CPU.

    Args:
        fields: as :func:`environment` returns them.
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
    """Return the installed versions of what must be the same everywhere, and of known malicious releases."""
    versions = {}
    for name in sorted({*_SAME_EVERYWHERE, *_COMPROMISED}):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def judge_libraries(installed: Mapping[str, str]) -> list[Finding]:
    """Find malicious releases; `pip check` tells of versions that do not fit together."""
    return [
        error(
            LIBRARIES,
            "compromised release",
            f"{name} {installed[name]}, a malicious upload that reads credentials when it is imported",
            "2.6.4 or newer",
            "pip install 'lightning>=2.6.4,<2.7', and change every password, key and token that this machine could "
            f"read ({name} was perhaps imported already)",
        )
        for name, versions in _COMPROMISED.items()
        if installed.get(name) in versions
    ]


def compared_versions(installed: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that must be the same on all machines; imports torch.

    Args:
        installed: distribution -> version.
    """
    import torch

    has_nccl = torch.version.cuda is not None and torch.distributed.is_nccl_available()
    return {
        "python": sys.version.split()[0],
        **{name: installed.get(name, "none") for name in _SAME_EVERYWHERE},
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none",
    }


def judge_same(by_host: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Compare the versions of all machines; ranks of different versions compute, or communicate, differently.

    Args:
        by_host: host -> name -> version, as :func:`compared_versions` returns them.
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
            todo = "install the same everywhere: pip install -c constraints.txt, or one image for all"
            found.append(error(LIBRARIES, f"{name} everywhere", f"{name} differs: {what}", "one version", todo))
    return found or [ok(LIBRARIES, "same everywhere", f"{len(by_host)} machines have the same versions")]


# ---------------------------------------------------------------------------------------------------------------------
# GPUs


@dataclass(frozen=True)
class DeviceFacts:
    """GPUs of one machine.

    Attributes:
        files: device files of the driver.
        usable: GPUs that torch can use.
        built_for: version of CUDA or ROCm that torch is built for; empty: none.
        torch_says: what torch warns of while it looks.
        visible: ``CUDA_VISIBLE_DEVICES``; ``None``: not set.
    """

    files: int = 0
    usable: int = 0
    built_for: str = ""
    torch_says: str = ""
    visible: str | None = None


def device_facts() -> DeviceFacts:
    """Return the GPUs of this machine; imports torch, and makes no CUDA context."""
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
    """Judge whether a run finds the GPUs that it asks for."""
    there = max(facts.files, facts.usable)
    if accelerator == "cpu" or (accelerator == "auto" and not there):
        return ok(DEVICES, "accelerator", "ranks compute on the CPU")
    if not facts.usable:
        return _unusable(facts, there)
    found = f"{facts.usable} of {there} GPUs that torch can use"
    found += f" ({VISIBLE}={facts.visible})" if facts.visible is not None else ""
    if demand.ranks > facts.usable:
        todo = f"devices={facts.usable}" + (f", or correct {VISIBLE}" if facts.visible is not None else "")
        return error(DEVICES, "GPUs", f"{found}, for {demand.ranks} ranks", "a GPU for each rank", todo)
    return ok(DEVICES, "GPUs", found)


def _unusable(facts: DeviceFacts, there: int) -> Finding:
    if not there:
        what, todo = "there is no GPU (no /dev/nvidia*)", "accelerator=cpu, or docker run --gpus all"
    elif not facts.built_for:
        what = f"{there} GPUs, but torch is built without CUDA"
        todo = "install a CUDA build of the same torch (pytorch.org/get-started says how), or type accelerator=cpu"
    elif facts.visible is not None and facts.visible.strip() in ("", "-1"):
        what, todo = f"{VISIBLE}={facts.visible!r} hides all GPUs", f"unset {VISIBLE}"
    else:
        what = f"torch can use none of {there} GPUs: {facts.torch_says or 'it does not say why'}"
        todo = (
            "nvidia-smi must answer; then see dmesg, the fabric manager (systemctl status nvidia-fabricmanager) and "
            "the container's runtime (docker run --gpus all)"
        )
    return error(DEVICES, "GPUs", what, "GPUs that torch can use", todo)
