"""Collects why layouts cannot be had while they are looked at."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainwright.core.device_profiles import DeviceProfile
from trainwright.planning.memory.peak import KINDS, Held
from trainwright.planning.search.plan import Refusal

_GIB = 2**30


class Refusals:
    """One refusal for each layout and kind: the first, and of those for want of memory the one that lacks least."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Refusal] = {}

    def add(self, what: str, kind: str, reason: str, overrides: Sequence[str] = (), needed: float = 0.0) -> None:
        """Take note of one; the arguments are those of :class:`~trainwright.planning.search.plan.Refusal`."""
        known = self._known.get((what, kind))
        if known is None or (needed and needed < known.needed):
            self._known[what, kind] = Refusal(what, kind, reason, tuple(overrides), needed)

    def beside(self, possible: Collection[str]) -> tuple[Refusal, ...]:
        """Those of layouts that are possible in no way.

        Args:
            possible: titles of all that are.
        """
        return tuple(each for each in self._known.values() if each.what not in possible)


def too_large(held: Held, capacity: float, profile: DeviceProfile) -> str:
    """The reason for want of memory.

    Args:
        held: what the layout needs at the least.
        capacity: bytes of a device that tensors may take.
        profile: of the device.
    """
    if held.host > profile.host_memory_bytes:
        return (
            f"needs {held.host / _GIB:.1f} GiB of host memory a rank, device={profile.name} has "
            f"{profile.host_memory_bytes / _GIB:.1f} GiB"
        )
    sizes = {kind: getattr(held, kind) for kind in KINDS}
    listed = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in sizes.items() if size > 0.05 * _GIB)
    return (
        f"needs {held.total / _GIB:.1f} GiB a rank at the least ({listed}), device={profile.name} has "
        f"{capacity / _GIB:.1f} GiB for it"
    )
