"""GPUs: whether torch, the driver and NCCL fit, and what the driver says of their health."""

from __future__ import annotations

import os
import re
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.core.text.sizes import size_text
from trainwright.tools.doctor.finding import Finding, error, ok, warning
from trainwright.tools.doctor.limits import Demand

AREA = "devices"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_SMI_SECONDS = 20.0
_MIB = 2**20
# Memory of a GPU that nobody uses.
_TAKEN = 0.05
_FIELDS = (
    "index,uuid,name,driver_version,memory.total,memory.used,persistence_mode,ecc.errors.uncorrected.volatile.total,"
    "compute_cap,pci.bus_id"
)
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
# What NVIDIA's list of Xid errors says of those that come from the machine, not from a program.
_XIDS = {
    48: "a memory error that could not be corrected: reset the GPU (nvidia-smi -r), then watch it",
    62: "the GPU's own controller stopped: restart the machine",
    63: "a row of memory was replaced: reset the GPU when it is idle (nvidia-smi -r)",
    64: "a row of memory could not be replaced: have the GPU exchanged",
    74: "an error of NVLink: look at nvidia-smi nvlink -e, then have the link looked at",
    79: "the GPU has fallen off the bus: restart the machine; if it comes back, look at power and seating",
    92: "many corrected memory errors: watch it",
    94: "a memory error, contained in one program: restart that program, reset the GPU when it is idle",
    95: "a memory error that was not contained: reset the GPU (nvidia-smi -r)",
    119: "the GPU's system processor did not answer: restart the machine",
    120: "the GPU's system processor failed: restart the machine",
}


@dataclass(frozen=True)
class Gpu:
    """What the driver says of one.

    Args:
        index: among all of the machine.
        uuid: by which it can be chosen.
        name: of the product.
        memory: bytes.
        used: bytes taken now.
        persistent: whether the driver stays loaded without a user; ``None``: it does not say.
        uncorrected: memory errors since the driver was loaded; ``None``: no ECC.
        capability: like ``9.0``.
        bus: PCI address.
        remap_pending: whether rows of memory wait for a reset to be replaced.
        remap_failed: whether rows of memory could not be replaced.
    """

    index: int
    uuid: str = ""
    name: str = ""
    memory: int = 0
    used: int = 0
    persistent: bool | None = None
    uncorrected: int | None = None
    capability: str = ""
    bus: str = ""
    remap_pending: bool = False
    remap_failed: bool = False


@dataclass(frozen=True)
class DeviceFacts:
    """Of one machine.

    Args:
        gpus: that the driver shows.
        files: device files of GPUs, ``/dev/nvidia0``, ...
        driver: version; empty: unknown.
        driver_cuda: newest CUDA that the driver runs; empty: unknown.
        torch_cuda: CUDA that torch was built with; ``None``: without.
        usable: GPUs that torch counts.
        torch_says: of why it can use none.
        architectures: that torch has kernels for, ``sm_90``, ``compute_90``, ...
        nccl: version that torch uses; empty: none.
        nccl_installed: version of NCCL's package; empty: none.
        visible: ``CUDA_VISIBLE_DEVICES``; ``None``: not set.
        xids: PCI address and number of errors that the kernel's log holds; ``None``: it may not be read.
        other: GPUs of another maker that torch was built for (ROCm), told by its version; empty: none.
    """

    gpus: Sequence[Gpu] = ()
    files: Sequence[str] = ()
    driver: str = ""
    driver_cuda: str = ""
    torch_cuda: str | None = None
    usable: int = 0
    torch_says: str = ""
    architectures: Sequence[str] = ()
    nccl: str = ""
    nccl_installed: str = ""
    visible: str | None = None
    xids: Sequence[tuple[str, int]] | None = None
    other: str = ""


# ---------------------------------------------------------------------------------------------------------------------
# Facts


def device_facts(installed: Mapping[str, str]) -> DeviceFacts:
    """Of this machine; imports torch, and makes no CUDA context.

    Args:
        installed: distribution -> version.
    """
    import torch

    files = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
        architectures = torch.cuda.get_arch_list() if usable else []
    has_nccl = torch.version.cuda is not None and torch.distributed.is_nccl_available()
    gpus = _gpus() if files else []
    return DeviceFacts(
        gpus=[gpu for gpu, _ in gpus],
        files=files,
        driver=gpus[0][1] if gpus else "",
        driver_cuda=_driver_cuda() if gpus else "",
        torch_cuda=torch.version.cuda,
        usable=usable,
        torch_says="; ".join(str(each.message).splitlines()[0] for each in said),
        architectures=architectures,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",
        nccl_installed=next((v for name, v in installed.items() if name.startswith("nvidia-nccl")), ""),
        visible=os.environ.get(VISIBLE),
        xids=xids_of(_says(["dmesg"])) if files else [],
        other=torch.version.hip or "",
    )


def _says(command: Sequence[str]) -> str | None:
    """What a program prints; None if it is not there, is not allowed or does not answer."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed words
            list(command), capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _gpus() -> list[tuple[Gpu, str]]:
    """With the version of the driver."""
    rows = (_says(["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]) or "").splitlines()
    fields = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
    remapped = (_says(["nvidia-smi", f"--query-remapped-rows={fields}", "--format=csv,noheader"]) or "").splitlines()
    return parse_gpus(rows, remapped)


def parse_gpus(rows: Sequence[str], remapped: Sequence[str]) -> list[tuple[Gpu, str]]:
    """From lines of nvidia-smi: of its GPUs, and of their remapped rows.

    Returns:
        Each GPU, with the version of the driver.
    """
    rows_of = {}
    for line in remapped:
        bus, pending, failed = (word.strip() for word in line.split(","))
        rows_of[bus] = pending not in ("0", "No", "[N/A]"), failed not in ("0", "No", "[N/A]")
    found = []
    for row in rows:
        index, uuid, name, driver, total, used, persistent, ecc, capability, bus = (w.strip() for w in row.split(","))
        is_pending, has_failed = rows_of.get(bus, (False, False))
        gpu = Gpu(
            index=int(index),
            uuid=uuid,
            name=name,
            memory=_MIB * int(total) if total.isdecimal() else 0,
            used=_MIB * int(used) if used.isdecimal() else 0,
            persistent={"Enabled": True, "Disabled": False}.get(persistent),
            uncorrected=int(ecc) if ecc.isdecimal() else None,
            capability=capability,
            bus=bus,
            remap_pending=is_pending,
            remap_failed=has_failed,
        )
        found.append((gpu, driver))
    return found


def _driver_cuda() -> str:
    match = re.search(r"CUDA(?: UMD)? Version:\s*([\d.]+)", _says(["nvidia-smi"]) or "")
    return match[1] if match else ""


def xids_of(log: str | None) -> list[tuple[str, int]] | None:
    """PCI addresses and numbers of the errors in the kernel's log; ``None`` for a log that may not be read."""
    return None if log is None else [(bus, int(number)) for bus, number in _XID.findall(log)]


# ---------------------------------------------------------------------------------------------------------------------
# Judgements


def judge_devices(facts: DeviceFacts, demand: Demand, accelerator: str = "auto") -> list[Finding]:
    """Whether a run finds the GPUs that it asks for, and whether they are well.

    Args:
        facts: of one machine.
        demand: of the run.
        accelerator: ``auto``, ``cpu`` or ``gpu``, as in the configuration.
    """
    has_hardware = bool(facts.gpus or facts.files)
    if accelerator == "cpu" or (accelerator == "auto" and not has_hardware and not facts.usable):
        there = f"; {len(facts.gpus) or len(facts.files)} GPUs are left alone" if has_hardware else ""
        return [ok(AREA, "accelerator", f"ranks compute on the CPU{there}")]
    broken = _unusable(facts, has_hardware)
    if broken is not None:
        return [broken, *_health(facts)]
    return [
        *_visible(facts),
        _count(facts, demand),
        _torch_and_driver(facts),
        *_kernels(facts),
        *_nccl(facts, demand),
        *_health(facts),
    ]


def _unusable(facts: DeviceFacts, has_hardware: bool) -> Finding | None:
    """Why torch uses no GPU; None if it does."""
    if facts.usable:
        return None
    if not has_hardware:
        return error(
            AREA, "GPUs", "there is no GPU (no /dev/nvidia*)", "a GPU", "accelerator=cpu, or docker run --gpus all"
        )
    if facts.torch_cuda is None and not facts.other:
        what = f"{len(facts.gpus) or len(facts.files)} GPUs, but torch is built without CUDA"
        todo = "install a CUDA build of the same torch (pytorch.org/get-started says how), or type accelerator=cpu"
        return error(AREA, "torch and CUDA", what, "a build of torch for CUDA", todo)
    if facts.visible is not None and facts.visible.strip() in ("", "-1"):
        return error(AREA, VISIBLE, f"{VISIBLE}={facts.visible!r} hides all GPUs", "their numbers", f"unset {VISIBLE}")
    old = _older(facts.driver_cuda, facts.torch_cuda or "")
    if old:
        return _old_driver(facts)
    what = (
        f"torch can use none of {len(facts.gpus) or len(facts.files)} GPUs: {facts.torch_says or 'it does not say why'}"
    )
    todo = "nvidia-smi must answer; then see dmesg, the fabric manager (systemctl status nvidia-fabricmanager) and the "
    return error(AREA, "GPUs", what, "GPUs that answer", todo + "container's runtime (docker run --gpus all)")


def _old_driver(facts: DeviceFacts) -> Finding:
    return error(
        AREA,
        "driver",
        f"driver {facts.driver} runs CUDA up to {facts.driver_cuda}, torch is built with {facts.torch_cuda}",
        f"a driver for CUDA {facts.torch_cuda} (drivers run older CUDA, and newer only of the same first number)",
        "install a newer driver, or a build of torch for an older CUDA",
    )


def _older(driver: str, torch: str) -> bool:
    """Whether a driver is too old; within a first number any is new enough (CUDA's minor version compatibility)."""
    return bool(driver and torch) and int(driver.split(".")[0]) < int(torch.split(".")[0])


def _visible(facts: DeviceFacts) -> list[Finding]:
    if not facts.visible:
        return []
    names = [name.strip() for name in facts.visible.split(",")]
    known = {str(gpu.index) for gpu in facts.gpus}
    # Beginnings of UUIDs are names too.
    missing = [n for n in names if n not in known and not any(gpu.uuid.startswith(n) for gpu in facts.gpus)]
    if facts.gpus and missing and not any(name.startswith("MIG") for name in missing):
        what = f"{VISIBLE}={facts.visible}: there is no GPU {', '.join(missing)}; those behind it are hidden too"
        return [
            error(AREA, VISIBLE, what, f"numbers from 0 to {len(facts.gpus) - 1}", f"unset {VISIBLE}, or correct it")
        ]
    if len(set(names)) < len(names):
        return [error(AREA, VISIBLE, f"{VISIBLE}={facts.visible} names a GPU twice", "each once", f"correct {VISIBLE}")]
    return [ok(AREA, VISIBLE, f"{VISIBLE}={facts.visible}")]


def _count(facts: DeviceFacts, demand: Demand) -> Finding:
    names = sorted({gpu.name for gpu in facts.gpus})
    found = f"{facts.usable} GPUs that torch can use" + (f": {', '.join(names)}" if names else "")
    if demand.ranks > facts.usable:
        what = f"{found}, for {demand.ranks} ranks"
        return error(AREA, "GPUs", what, "a GPU for each rank", f"devices={facts.usable}")
    if len(names) > 1:
        return warning(
            AREA, "GPUs", found, "GPUs of one kind: the slowest sets the pace", "balance=measured, or choose"
        )
    return ok(AREA, "GPUs", found)


def _torch_and_driver(facts: DeviceFacts) -> Finding:
    if _older(facts.driver_cuda, facts.torch_cuda or ""):
        return _old_driver(facts)
    return ok(
        AREA,
        "driver",
        f"driver {facts.driver or 'unknown'}, CUDA up to {facts.driver_cuda or 'unknown'}; torch {facts.torch_cuda}",
    )


def _kernels(facts: DeviceFacts) -> list[Finding]:
    return [
        error(
            AREA,
            "kernels",
            f"torch has no kernels for {gpu.name} (compute capability {gpu.capability}); it has "
            f"{', '.join(facts.architectures)}",
            f"a build with sm_{gpu.capability.replace('.', '')}",
            "install a build of torch for a CUDA that knows this GPU",
        )
        for gpu in facts.gpus
        if gpu.capability and facts.architectures and not runs_on(gpu.capability, facts.architectures)
    ]


def runs_on(capability: str, architectures: Sequence[str]) -> bool:
    """Whether a build has kernels for a GPU: of the same first number and no newer, or to be compiled when loaded.

    Args:
        capability: of the GPU, ``9.0``.
        architectures: of the build, ``sm_80``, ``sm_90a``, ``compute_90``.
    """
    major, minor = (int(part) for part in capability.split("."))
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if match is None:
            continue
        kind, first, second, special = match[1], int(match[2]), int(match[3]), match[4]
        if special == "a" and (first, second) != (major, minor):
            continue
        if kind == "sm" and first == major and second <= minor:
            return True
        if kind == "compute" and (first, second) <= (major, minor):
            return True
    return False


def _nccl(facts: DeviceFacts, demand: Demand) -> list[Finding]:
    if facts.other:
        return []
    if not facts.nccl:
        if demand.world_size == 1:
            return []
        what, todo = "torch is built without NCCL", "install a build of torch with it, or devices=1"
        return [error(AREA, "NCCL", what, "NCCL, by which GPUs speak to each other", todo)]
    if facts.nccl_installed and facts.nccl_installed.split(".")[:3] != facts.nccl.split(".")[:3]:
        what = f"torch has loaded NCCL {facts.nccl}, but {facts.nccl_installed} is installed with it"
        todo = "look for another libnccl.so in LD_LIBRARY_PATH and LD_PRELOAD, and leave it out"
        return [warning(AREA, "NCCL", what, "the one that torch was built with", todo)]
    return [ok(AREA, "NCCL", f"NCCL {facts.nccl}")]


def _health(facts: DeviceFacts) -> list[Finding]:
    found = [finding for gpu in facts.gpus for finding in _health_of(gpu)]
    known: dict[tuple[str, int], int] = {}
    for bus, number in facts.xids or ():
        known[bus, number] = known.get((bus, number), 0) + 1
    for (bus, number), times in sorted(known.items()):
        if number in _XIDS:
            what = f"the kernel's log holds Xid {number} of the GPU at {bus}, {times} times"
            judge = warning if number in (63, 92, 94) else error
            found.append(judge(AREA, "Xid", what, "none", _XIDS[number]))
    if found or not facts.gpus:
        return found
    log = "no Xid in the kernel's log" if facts.xids is not None else "the kernel's log may not be read (Xid unknown)"
    return [ok(AREA, "health", f"no uncorrected memory errors, {log}")]


def _health_of(gpu: Gpu) -> list[Finding]:
    found, name = [], f"GPU {gpu.index} ({gpu.name})"
    reset = f"nvidia-smi -r -i {gpu.index} when it is idle (by an administrator)"
    if gpu.remap_failed:
        what = f"{name}: rows of its memory could not be replaced"
        found.append(error(AREA, "memory of GPUs", what, "none", "have it exchanged; leave it out until then"))
    elif gpu.uncorrected:
        what = f"{name}: {gpu.uncorrected} memory errors that were not corrected"
        found.append(error(AREA, "memory of GPUs", what, "none: they end runs or change numbers", reset))
    elif gpu.remap_pending:
        found.append(warning(AREA, "memory of GPUs", f"{name}: rows of its memory wait to be replaced", "none", reset))
    if gpu.persistent is False:
        what = f"{name}: persistence mode is off"
        todo = "nvidia-smi -pm 1 (by an administrator), or the service nvidia-persistenced"
        found.append(warning(AREA, "persistence", what, "on; else the driver is loaded anew at each start", todo))
    if gpu.memory and gpu.used > _TAKEN * gpu.memory:
        what = f"{name}: {size_text(gpu.used)} of {size_text(gpu.memory)} are taken"
        found.append(warning(AREA, "use of GPUs", what, "a GPU that nobody uses", "nvidia-smi shows by whom; end it"))
    return found


def judge_same_nccl(by_host: Mapping[str, DeviceFacts]) -> list[Finding]:
    """Whether all machines have the same NCCL, which refuses to speak to another version of itself."""
    versions: dict[str, list[str]] = {}
    for host, facts in by_host.items():
        versions.setdefault(facts.nccl, []).append(host)
    if len(versions) < 2:
        return []
    what = "; ".join(f"{version or 'none'} on {', '.join(hosts)}" for version, hosts in versions.items())
    return [error(AREA, "NCCL everywhere", f"NCCL differs: {what}", "one version", "install the same torch everywhere")]
