"""Options of ``balance``. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from trainwright.core.config.options import number, refuse, unknown_options, value_problems, word

NONE, AUTO, FIXED = "none", "auto", "fixed"


@dataclass
class BalanceOptions:
    """`balance=none|auto|fixed`: who computes how much of the global batch, which itself stays what it is."""

    # none = all data ranks the same, auto = by measured speed, fixed = by shares.
    kind: str = word(NONE, NONE, AUTO, FIXED)
    # Parts of the data ranks in any unit, like [3,1] (kind=fixed); null = none.
    shares: list[float] | None = number(None, above=0)
    # Optimizer steps that are measured before shares are decided upon anew (kind=auto).
    every_steps: int = number(20, least=1, unit="optimizer steps")
    # Weight of what was measured before, below 1 (kind=auto); 0 = off.
    smoothing: float = number(0.5, below=1, unit="0 is off")
    # Part of an equal share that a rank keeps at least (kind=auto).
    least_share: float = number(0.1, most=1, unit="times an equal share")
    # Times an equal share that a rank gets at most: so many times micro_batch_size samples it must be able to hold at
    # once (kind=auto).
    most_share: float = number(2.0, above=1, unit="times an equal share")
    # Part of the time of a step below which a gain is not worth other shares (kind=auto).
    least_gain: float = number(0.05, below=1, unit="of the time of a step")


BalanceArgument = str | Sequence[float] | Mapping[str, Any]


def balance_option_problems(given: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the options by themselves, one message each.

    Args:
        given: by name; the rest is at its default.
    """
    unknown = unknown_options(BalanceOptions, given, "balance.")
    options = {**asdict(BalanceOptions()), **given}
    problems = unknown or list(value_problems(BalanceOptions, options, "balance."))
    # Combinations can be judged only if each value is valid.
    return problems or [*_about_shares(options), *_without_effect(options)]


def _about_shares(options: Mapping[str, Any]) -> list[str]:
    if options["kind"] == FIXED and not options["shares"]:
        return ["balance.kind=fixed without balance.shares; set the shares of data ranks: balance.shares=[3,1]"]
    if options["kind"] != FIXED and options["shares"] is not None:
        shares = ",".join(f"{share:g}" for share in options["shares"])
        return [
            f"balance.shares=[{shares}] with balance.kind={options['kind']}, which does not read them; type "
            "balance=fixed, or leave balance.shares out"
        ]
    return []


def _without_effect(options: Mapping[str, Any]) -> list[str]:
    if options["kind"] == AUTO:
        return []
    default = BalanceOptions()
    return [
        f"balance.{each.name}={options[each.name]} with balance.kind={options['kind']}: nothing is measured, so it has "
        f"no effect; type balance=auto, or leave balance.{each.name} out"
        for each in fields(BalanceOptions)
        if each.name not in ("kind", "shares") and options[each.name] != getattr(default, each.name)
    ]


def balance_options(balance: BalanceArgument) -> BalanceOptions:
    """Return the options for ``Trainer(balance=...)``.

    Args:
        balance: a kind; or shares, for ``"fixed"``; or options by name, with ``kind`` defaulting to ``"auto"``.

    Raises:
        ValueError: if they are invalid.
    """
    if isinstance(balance, str):
        given: dict[str, Any] = {"kind": balance}
    elif isinstance(balance, Mapping):
        given = {"kind": AUTO, **balance}
    elif isinstance(balance, Sequence):
        given = {"kind": FIXED, "shares": balance}
    else:
        raise ValueError(
            f"balance={balance!r} (allowed: 'none', 'auto', a list of shares, options such as {{'every_steps': 50}})"
        )
    refuse(balance_option_problems(given))
    if given.get("shares") is not None:
        given["shares"] = list(map(float, given["shares"]))
    return BalanceOptions(**given)
