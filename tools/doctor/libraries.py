"""What is installed, against what is allowed, and whether all machines have the same."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from trainwright.tools.doctor.finding import Finding, error, ok, warning

AREA = "libraries"
_DISTRIBUTION = "trainwright"
# Uploaded by thieves of an account (April 2026): importing them sends secrets of the machine away.
_COMPROMISED = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
# Must be the same everywhere: ranks of different versions compute, or speak, differently.
_SAME_EVERYWHERE = ("python", "torch", "lightning", "numpy", _DISTRIBUTION)


@dataclass(frozen=True)
class LibraryFacts:
    """Of one environment.

    Args:
        python: version.
        python_allowed: of this package, like ``>=3.11,<3.14``.
        requirements: of this package, as its metadata has them.
        installed: distribution -> version, of those that are there.
        backends: of torch.distributed; ``None``: torch was not imported.
    """

    python: str
    python_allowed: str
    requirements: Sequence[str] = ()
    installed: Mapping[str, str] = field(default_factory=dict)
    backends: Sequence[str] | None = None


def library_facts() -> LibraryFacts:
    """Of this process, from the metadata of what is installed; torch is asked if it is imported."""
    try:
        allowed = metadata.metadata(_DISTRIBUTION)["Requires-Python"] or ""
        wanted = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # used from its folder
        allowed, wanted = "", []
    names = {Requirement(text).name for text in wanted} | set(_COMPROMISED) | {_DISTRIBUTION, "nvidia-nccl-cu12"}
    names |= {"nvidia-nccl-cu13"}
    found = {name: version for name in sorted(names) if (version := _version(name)) is not None}
    torch = sys.modules.get("torch")
    backends = None
    if torch is not None:
        dist = torch.distributed
        asked = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available} if dist.is_available() else {}
        backends = [name for name, is_there in asked.items() if is_there()]
    return LibraryFacts(sys.version.split()[0], allowed, wanted, found, backends)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def judge_libraries(facts: LibraryFacts) -> list[Finding]:
    """One environment against the ranges of this package."""
    return [
        *_compromised(facts),
        _python(facts),
        *_ranges(facts),
        *_backends(facts),
    ]


def _compromised(facts: LibraryFacts) -> list[Finding]:
    return [
        error(
            AREA,
            "compromised release",
            f"{name} {facts.installed[name]}, a malicious upload that reads credentials when it is imported",
            "2.6.4 or newer",
            f"pip install 'lightning>=2.6.4,<2.7', and change every password, key and token that this machine could "
            f"read ({name} was perhaps imported already)",
        )
        for name, versions in _COMPROMISED.items()
        if facts.installed.get(name) in versions
    ]


def _python(facts: LibraryFacts) -> Finding:
    found = f"Python {facts.python}"
    if facts.python_allowed and not Requirement(f"python{facts.python_allowed}").specifier.contains(facts.python):
        return error(AREA, "python", found, facts.python_allowed, f"make the environment with Python {_newest(facts)}")
    return ok(AREA, "python", found)


def _newest(facts: LibraryFacts) -> str:
    return " or ".join(text for text in facts.python_allowed.split(",") if text) or "of another version"


def _ranges(facts: LibraryFacts) -> list[Finding]:
    found, good = [], []
    for text in facts.requirements:
        wanted = Requirement(text)
        version = facts.installed.get(wanted.name)
        is_extra = wanted.marker is not None and "extra" in str(wanted.marker)
        if wanted.marker is not None and not is_extra and not wanted.marker.evaluate():
            continue
        if version is None:
            if not is_extra:
                range_ = f"{wanted.name}{wanted.specifier}"
                found.append(error(AREA, wanted.name, "is not installed", range_, f"pip install '{range_}'"))
        elif not wanted.specifier.contains(Version(version), prereleases=True):
            # A part that is not needed to train with what is needed.
            judge = warning if is_extra else error
            todo = f"pip install '{wanted.name}{wanted.specifier}'"
            found.append(judge(AREA, wanted.name, f"{wanted.name} {version}", str(wanted.specifier), todo))
        elif not is_extra:
            good.append(f"{wanted.name} {version}")
    return [*found, ok(AREA, "versions", ", ".join(good))] if good else found


def _backends(facts: LibraryFacts) -> list[Finding]:
    if facts.backends is None:
        return []
    found = f"torch speaks {', '.join(facts.backends) or 'no backend'} between ranks"
    if "gloo" not in facts.backends:
        return [error(AREA, "backends", found, "gloo, which every run uses", "install a build of torch with gloo")]
    return [ok(AREA, "backends", found)]


def judge_same(by_host: Mapping[str, LibraryFacts]) -> list[Finding]:
    """Whether all machines have the same versions.

    Args:
        by_host: facts of each.
    """
    if len(by_host) < 2:
        return []
    found = []
    for name in _SAME_EVERYWHERE:
        hosts: dict[str, list[str]] = {}
        for host, facts in by_host.items():
            version = facts.python if name == "python" else facts.installed.get(name, "none")
            hosts.setdefault(version, []).append(host)
        if len(hosts) > 1:
            what = "; ".join(f"{version} on {', '.join(names)}" for version, names in hosts.items())
            todo = "install the same everywhere: pip install -c constraints.txt, or one image for all"
            found.append(error(AREA, f"{name} everywhere", f"{name} differs: {what}", "one version", todo))
    return found or [ok(AREA, "same everywhere", f"{len(by_host)} machines have the same versions")]
