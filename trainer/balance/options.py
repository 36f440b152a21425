"""Options of ``balance``. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from trainwright.core.config.option_rules import Rule, broken_rules, is_count, is_number, is_positive
from trainwright.core.config.options import refuse

NONE, AUTO, FIXED = "none", "auto", "fixed"
KINDS = (NONE, AUTO, FIXED)


@dataclass
class BalanceOptions:
    """`balance=none|auto|fixed`: who computes how much of the global batch, which itself stays what it is."""

    # none = all data ranks the same, auto = by measured speed, fixed = by shares.
    kind: str = "none"
    # Parts of the data ranks in any unit, like [3,1] (kind=fixed); null = none.
    shares: list[float] | None = None
    # Optimizer steps that are measured before shares are decided upon anew (kind=auto).
    every_steps: int = 20
    # Weight of what was measured before, below 1 (kind=auto); 0 = off.
    smoothing: float = 0.5
    # Part of an equal share that a rank keeps at least (kind=auto).
    least_share: float = 0.1
    # Times an equal share that a rank gets at most: so many times micro_batch_size samples it must be able to hold at
    # once (kind=auto).
    most_share: float = 2.0
    # Part of the time of a step below which a gain is not worth other shares (kind=auto).
    least_gain: float = 0.05


BalanceArgument = str | Sequence[float] | Mapping[str, Any]


def _are_shares(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and all(map(is_positive, value))


_RULES: dict[str, Rule] = {
    "kind": (lambda value: value in KINDS, ", ".join(KINDS)),
    "shares": (lambda value: value is None or _are_shares(value), "one number above 0 for each data rank, or None"),
    "every_steps": (is_count, "1 or more optimizer steps"),
    "smoothing": (lambda value: is_number(value) and value < 1, "0, which is off, to less than 1"),
    "least_share": (lambda value: is_number(value) and value <= 1, "0 to 1 times an equal share"),
    "most_share": (lambda value: is_number(value) and value > 1, "more than 1 times an equal share"),
    "least_gain": (lambda value: is_number(value) and value < 1, "0 to less than 1 of the time of a step"),
}


def balance_option_problems(given: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the options by themselves, one message each.

    Args:
        given: by name; the rest is at its default.
    """
    unknown = sorted(set(given) - set(_RULES))
    if unknown:
        return [f"balance.{name}: there is no such option (allowed: {', '.join(_RULES)})" for name in unknown]
    options = {**asdict(BalanceOptions()), **given}
    problems = [f"balance.{problem}" for problem in broken_rules(_RULES, options)]
    if problems:
        return problems  # combinations can be judged only if each value is valid
    return [*_about_shares(options), *_without_effect(options)]


def _about_shares(options: Mapping[str, Any]) -> list[str]:
    if options["kind"] == FIXED and options["shares"] is None:
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
