"""Profiles of devices, their links and hosts, for planning.

A profile is a yaml file of the group `device` (`conf/device/`); docs/planning.md lists the published figures and their
sources. `trainwright profile` measures one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]

from trainwright.core.failures.error_text import first_line

AUTO, CPU = "auto", "cpu"
MEASURED = Path("conf", "device", "mine.yaml")
"""Default output of `trainwright profile`, and where `device=auto` looks, relative to the working directory."""
# Substring of torch's GPU name -> profile; the first match counts.
_BY_NAME = {
    "B200": "b200",
    "H200": "h200",
    "GH200": "h200",
    "H100": "h100",
    "H800": "h100",
    "A100-SXM4-40GB": "a100_40",
    "A100-PCIE-40GB": "a100_40",
    "A100": "a100_80",
    "A800": "a100_80",
    "L40S": "l40s",
}
# dtype of matrix products, by the precision of a run.
_ARITHMETIC = {"32": "float32", "bf16-mixed": "bfloat16", "bf16-true": "bfloat16", "16-mixed": "float16"}


@dataclass(frozen=True)
class LinkProfile:
    """Speed of the link between two devices.

    Args:
        latency: seconds of one message of a ring, without its bytes.
        bandwidth: bytes per second that one device sends, in one direction.
        call: seconds of one collective beside its messages; 0: included in ``latency``.
    """

    latency: float
    bandwidth: float
    call: float = 0.0


@dataclass(frozen=True)
class DeviceProfile:
    """A device within a homogeneous cluster.

    Args:
        name: of the profile.
        memory_bytes: memory of one device, bytes.
        flops: peak dense matrix FLOP/s by dtype: ``float32``, ``tf32``, ``bfloat16``, ``float16``.
        memory_bandwidth: of the device's own memory, bytes per second.
        efficiency: fraction of ``flops`` that the matrix products of a training step reach.
        devices_per_node: devices connected by ``within``.
        within: link between two devices of a node.
        across: link between nodes, per device.
        host_bandwidth: between a device and its host's memory, bytes per second in one direction.
        host_memory_bytes: host memory per device, bytes.
        operation_seconds: overhead of launching one torch operation; 0: not counted.
        gather_seconds: overhead of gathering a block's parameters, or reducing its gradients, beside the collective,
            with stage 3; 0: not counted.
        measured_on: machine that was measured, see :func:`machine_name`; empty: published or assumed figures.
        source: of the figures, for messages; empty: from the group ``device``.
        share: fraction of a core per rank that the figures above are for, where ranks outnumber cores; 1: a core each.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    efficiency: float
    devices_per_node: int
    within: LinkProfile
    across: LinkProfile
    host_bandwidth: float
    host_memory_bytes: int
    operation_seconds: float = 0.0
    gather_seconds: float = 0.0
    measured_on: str = ""
    source: str = ""
    share: float = 1.0

    @property
    def is_cpu(self) -> bool:
        """True if ranks compute on cores of the host, whose memory they use."""
        return CPU in self.name.lower()

    def flops_at(self, precision: str) -> float:
        """Return the FLOP/s of a training step under a precision.

        Args:
            precision: ``32``, ``bf16-mixed``, ``bf16-true`` or ``16-mixed``.
        """
        return self.efficiency * self.peak_at(precision)

    def peak_at(self, precision: str) -> float:
        """Return the peak FLOP/s of the dtype that a precision multiplies in.

        Args:
            precision: ``32``, ``bf16-mixed``, ``bf16-true`` or ``16-mixed``.
        """
        return self.flops.get(_ARITHMETIC[precision]) or self.flops["float32"]


def profile_of(cfg: DictConfig) -> DeviceProfile:
    """Return the profile that a configuration selects with the group ``device``.

    Args:
        cfg: composed, with ``device``, ``devices`` and ``accelerator``.

    Raises:
        ValueError: if a value is missing or not positive, or the GPU of this machine has no profile; the message says
            what to type.
    """
    plain: Any = OmegaConf.to_container(cfg.device, resolve=True)
    if plain.get("name") == AUTO:
        return _of_this_machine(cfg)
    return profile_from(plain)


def profile_from(values: Mapping[str, Any]) -> DeviceProfile:
    """Return a profile from plain values, as in a yaml of the group ``device``.

    Raises:
        ValueError: see :func:`profile_of`.
    """
    name = str(values.get("name"))
    of_links = {f"{link}.{key}": each for link in _LINKS for key, each in (values.get(link) or {}).items()}
    flat: dict[str, Any] = {**values, **of_links}
    numbers: dict[str, Any] = {key: flat.get(key) for key in _REQUIRED}
    numbers |= {key: flat.get(key) or 0.0 for key in _OPTIONAL}
    problems = [
        f"device.{key}={value} (allowed: a number above 0, without a unit)"
        for key, value in numbers.items()
        if type(value) not in (int, float) or not 0 <= value < float("inf") or (not value and key in _POSITIVE)
    ]
    flops = {kind: float(value) for kind, value in (values.get("flops") or {}).items() if value}
    if "float32" not in flops:
        problems.append("device.flops.float32 is missing (operations per second)")
    if problems:
        raise ValueError(f"the profile device={name} cannot be used: " + "; ".join(problems))
    given = {each.name: values[each.name] for each in fields(DeviceProfile) if values.get(each.name) is not None}
    links = {link: LinkProfile(*(float(numbers[f"{link}.{key}"]) for key in _OF_LINK)) for link in _LINKS}
    sizes = {key: int(numbers[key]) for key in ("memory_bytes", "devices_per_node", "host_memory_bytes")}
    return DeviceProfile(**{**given, **links, **sizes, "name": name, "flops": flops})


_LINKS, _OF_LINK = ("within", "across"), ("latency", "bandwidth", "call")
_PLAIN = ("memory_bytes", "memory_bandwidth", "efficiency", "devices_per_node", "host_bandwidth", "host_memory_bytes")
_POSITIVE = (*_PLAIN, "within.bandwidth", "across.bandwidth")
_REQUIRED = (*_POSITIVE, "within.latency", "across.latency")
_OPTIONAL = ("within.call", "across.call", "operation_seconds", "gather_seconds")


def shared_by(profile: DeviceProfile, ranks: int) -> DeviceProfile:
    """Return a profile for nodes of ``ranks`` ranks, which share cores and memory if they outnumber the cores.

    A profile measured with more ranks than cores is of such shares; fewer ranks have larger ones, up to a core each.

    Args:
        profile: of the devices of this machine.
        ranks: on this machine.
    """
    most = max(profile.devices_per_node, 1)
    profile = replace(profile, devices_per_node=ranks)
    part = min(most / ranks, 1 / profile.share)
    if part == 1 or not profile.is_cpu:
        return profile
    return replace(
        profile,
        memory_bytes=int(most / ranks * profile.memory_bytes),
        host_memory_bytes=int(most / ranks * profile.host_memory_bytes),
        flops={kind: part * each for kind, each in profile.flops.items()},
        memory_bandwidth=part * profile.memory_bandwidth,
        operation_seconds=profile.operation_seconds / part,
        gather_seconds=profile.gather_seconds / part,
        within=_slowed(profile.within, part),
        across=_slowed(profile.across, part),
        share=part * profile.share,
    )


def _slowed(link: LinkProfile, part: float) -> LinkProfile:
    """Scale a link, since cores carry messages too."""
    return LinkProfile(link.latency / part, link.bandwidth * part, link.call / part)


def profile_named(name: str) -> DeviceProfile:
    """Return a profile of the package by its file name.

    Raises:
        ValueError: if there is none; the message lists all.
    """
    from importlib.resources import files

    from trainwright.core.problems import did_you_mean

    folder = files("trainwright.conf") / "device"
    names = sorted(each.name.removesuffix(".yaml") for each in folder.iterdir() if each.name.endswith(".yaml"))
    names = [each for each in names if each != AUTO]
    if name not in names:
        raise ValueError(f"device={name}: unknown; {did_you_mean(name, names, 'devices')}")
    plain: Any = OmegaConf.to_container(OmegaConf.create((folder / f"{name}.yaml").read_text()))
    return profile_from(plain)


def profile_of_gpu(gpu: str) -> DeviceProfile | None:
    """Return the profile for torch's name of a GPU; None if there is none."""
    found = next((profile for part, profile in _BY_NAME.items() if part in gpu), None)
    return None if found is None else profile_named(found)


def profile_problems(cfg: DictConfig) -> list[str]:
    """Return the problems of the profile that a configuration selects; empty for ``device=auto``."""
    if cfg.device.name == AUTO:
        return []
    try:
        profile_of(cfg)
    except ValueError as error:
        return [str(error)]
    return []


def peak_flops_of(cfg: DictConfig) -> float | None:
    """Return the peak FLOP/s of one rank of a run; ``None``: unknown device.

    An explicit profile counts as it is, else that of the machine's GPUs; nothing is assumed for unknown GPUs and CPU
    cores.

    Args:
        cfg: resolved, with ``device``, ``accelerator`` and ``precision``.

    Raises:
        ValueError: if the selected profile is invalid, see :func:`profile_of`.
    """
    plain: Any = OmegaConf.to_container(cfg.device, resolve=True)
    profile = _of_gpus(cfg) if plain.get("name") == AUTO else profile_from(plain)
    return None if profile is None else profile.peak_at(cfg.precision)


def _of_gpus(cfg: DictConfig) -> DeviceProfile | None:
    from trainwright.core.processes.machine import num_gpus

    if cfg.accelerator == "cpu" or not num_gpus():
        return None
    import torch

    return profile_of_gpu(torch.cuda.get_device_name(0))


def machine_name(on_gpu: bool) -> str:
    """Return the identity of this machine in a measured profile: its GPU, or its number of cores."""
    from trainwright.core.processes.machine import num_cores

    if not on_gpu:
        return f"{num_cores()} CPU cores"
    import torch

    return str(torch.cuda.get_device_properties(0).name)


def _of_this_machine(cfg: DictConfig) -> DeviceProfile:
    """Return the measured profile, or else published figures of the GPUs or assumed ones of a CPU, with this memory."""
    from trainwright.core.processes.machine import num_gpus

    gpus = num_gpus() if cfg.accelerator != "cpu" else 0
    measured, instead = _measured(machine_name(gpus > 0))
    if measured is not None:
        return measured
    profile = _of_these_gpus(gpus) if gpus else _this_host(profile_named(CPU))
    figures = f"published figures of {profile.name}" if gpus else "assumed figures of a core"
    return replace(profile, source=f"device=auto: {figures}; {instead}")


def _measured(here: str) -> tuple[DeviceProfile | None, str]:
    """Return the profile measured on this machine, or advice on how to get one."""
    if not MEASURED.exists():
        return None, f"there is no {MEASURED}, which trainwright profile writes"
    try:
        profile = profile_from(dict(OmegaConf.to_container(OmegaConf.load(MEASURED))))  # type: ignore[arg-type]
    except (OSError, ValueError, TypeError, YAMLError) as error:
        raise ValueError(
            f"device=auto: {MEASURED} cannot be used: {first_line(error)}; type trainwright profile --overwrite, or "
            "device=<profile>"
        ) from error
    if profile.measured_on != here:
        of = profile.measured_on or "an unknown machine"
        return None, f"{MEASURED} is of {of}, this is {here}; trainwright profile --overwrite measures it"
    return replace(profile, source=f"device=auto: {MEASURED}, measured on {here} by trainwright profile"), ""


def _of_these_gpus(gpus: int) -> DeviceProfile:
    import torch

    about = torch.cuda.get_device_properties(0)
    profile = profile_of_gpu(about.name)
    if profile is None:
        raise ValueError(
            f"device=auto: there is no profile for the GPU of this machine, {about.name}; type device=<profile> of the "
            "one that is most like it, or measure it with trainwright profile"
        )
    return replace(profile, memory_bytes=about.total_memory, devices_per_node=gpus)


def _this_host(profile: DeviceProfile) -> DeviceProfile:
    from trainwright.core.processes.machine import num_cores

    cores = num_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return replace(profile, memory_bytes=memory // cores, host_memory_bytes=memory // cores, devices_per_node=cores)
