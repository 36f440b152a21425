"""What is installed, and whether torch can use the GPUs; the rest is what `torch.utils.collect_env` reports."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from trainwright.core.text.sizes import size_text
from trainwright.tools.doctor.finding import Finding, error, ok, warning
from trainwright.tools.doctor.machine import Demand

LIBRARIES, DEVICES = "libraries", "devices"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_DISTRIBUTION = "trainwright"
# Uploaded through a stolen account (April 2026): importing them sends secrets of the machine away.
_COMPROMISED = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
_SAME_EVERYWHERE = ("torch", "lightning", "numpy", _DISTRIBUTION)
_SMI_SECONDS = 20.0
# Share of a GPU's memory that the driver takes by itself.
_TAKEN = 0.05
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
    """Return the installed version of this package, of what it requires and of known malicious releases."""
    names = {Requirement(text).name for text in _requirements()} | {*_SAME_EVERYWHERE, *_COMPROMISED}
    versions = {}
    for name in sorted(names):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _requirements() -> list[str]:
    try:
        return metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # used from its folder
        return []


def judge_libraries(installed: Mapping[str, str], requirements: Sequence[str] | None = None) -> list[Finding]:
    """Compare what is installed with the ranges of this package.

    Args:
        installed: distribution -> version.
        requirements: as in a package's metadata. Default: those of this package.
    """
    found, good = _compromised(installed), []
    for wanted in map(Requirement, _requirements() if requirements is None else requirements):
        version = installed.get(wanted.name)
        is_extra = wanted.marker is not None and "extra" in str(wanted.marker)
        if wanted.marker is not None and not is_extra and not wanted.marker.evaluate():
            continue
        if version is not None and wanted.specifier.contains(version, prereleases=True):
            good += [] if is_extra else [f"{wanted.name} {version}"]
        elif version is not None or not is_extra:
            range_ = f"{wanted.name}{wanted.specifier}"
            what = f"{wanted.name} {version}" if version else "is not installed"
            judge = warning if is_extra else error  # training works without an extra
            found.append(judge(LIBRARIES, wanted.name, what, range_, f"pip install '{range_}'"))
    return [*found, ok(LIBRARIES, "versions", ", ".join(good))] if good else found


def _compromised(installed: Mapping[str, str]) -> list[Finding]:
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
class Gpu:
    """One GPU, as nvidia-smi shows it.

    Args:
        index: among all of the machine.
        name: of the product.
        memory: bytes.
        used: bytes taken now.
        uncorrected: memory errors since the driver was loaded; 0 also without ECC.
    """

    index: int
    name: str = ""
    memory: int = 0
    used: int = 0
    uncorrected: int = 0


@dataclass(frozen=True)
class DeviceFacts:
    """GPUs of one machine.

    Args:
        gpus: that the driver shows.
        files: number of device files, ``/dev/nvidia0``, ...
        usable: GPUs that torch counts.
        built_for: CUDA or ROCm that torch was built with; empty: neither.
        torch_says: warnings of torch about GPUs that it cannot use.
        visible: ``CUDA_VISIBLE_DEVICES``; ``None``: not set.
    """

    gpus: Sequence[Gpu] = ()
    files: int = 0
    usable: int = 0
    built_for: str = ""
    torch_says: str = ""
    visible: str | None = None


def device_facts() -> DeviceFacts:
    """Return the GPUs of this machine; imports torch, and makes no CUDA context."""
    import torch

    files = len(list(Path("/dev").glob("nvidia[0-9]*")))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return DeviceFacts(
        gpus=parse_gpus(_smi()) if files else (),
        files=files,
        usable=usable,
        built_for=torch.version.cuda or torch.version.hip or "",
        torch_says="; ".join(str(each.message).splitlines()[0] for each in said),
        visible=os.environ.get(VISIBLE),
    )


def _smi() -> str:
    fields = "index,name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(  # noqa: S603 - fixed words
            command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def parse_gpus(text: str) -> list[Gpu]:
    """Return the GPUs in lines of nvidia-smi; numbers that it does not know are 0."""
    found = []
    for row in text.splitlines():
        index, name, *numbers = (word.strip() for word in row.split(","))
        total, used, uncorrected = (int(number) if number.isdecimal() else 0 for number in numbers)
        found.append(Gpu(int(index), name, total * 2**20, used * 2**20, uncorrected))
    return found


def judge_devices(facts: DeviceFacts, demand: Demand, accelerator: str = "auto") -> list[Finding]:
    """Judge whether a run finds the GPUs that it asks for, and whether they are free and without memory errors.

    Args:
        facts: of one machine.
        demand: of the run.
        accelerator: ``auto``, ``cpu`` or ``gpu``, as in the configuration.
    """
    there = max(len(facts.gpus), facts.files, facts.usable)
    if accelerator == "cpu" or (accelerator == "auto" and not there):
        return [ok(DEVICES, "accelerator", "ranks compute on the CPU")]
    health = [finding for gpu in facts.gpus for finding in _health(gpu)]
    return [_usable(facts, demand, there) if facts.usable else _unusable(facts, there), *health]


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


def _usable(facts: DeviceFacts, demand: Demand, there: int) -> Finding:
    names = sorted({gpu.name for gpu in facts.gpus})
    found = f"{facts.usable} of {there} GPUs that torch can use" + (f": {', '.join(names)}" if names else "")
    found += f" ({VISIBLE}={facts.visible})" if facts.visible is not None else ""
    if demand.ranks > facts.usable:
        todo = f"devices={facts.usable}" + (f", or correct {VISIBLE}" if facts.visible is not None else "")
        return error(DEVICES, "GPUs", f"{found}, for {demand.ranks} ranks", "a GPU for each rank", todo)
    if len(names) > 1:
        wanted = "GPUs of one kind: the slowest sets the pace"
        return warning(DEVICES, "GPUs", found, wanted, "balance=measured, or choose")
    return ok(DEVICES, "GPUs", found)


def _health(gpu: Gpu) -> list[Finding]:
    found, name = [], f"GPU {gpu.index} ({gpu.name})"
    if gpu.uncorrected:
        what = f"{name}: {gpu.uncorrected} memory errors that were not corrected"
        reset = f"nvidia-smi -r -i {gpu.index} when it is idle (by an administrator)"
        found.append(error(DEVICES, "memory of GPUs", what, "none: they end runs or change numbers", reset))
    if gpu.memory and gpu.used > _TAKEN * gpu.memory:
        what = f"{name}: {size_text(gpu.used)} of {size_text(gpu.memory)} are taken"
        found.append(warning(DEVICES, "use of GPUs", what, "an idle GPU", "nvidia-smi shows by whom; end it"))
    return found
