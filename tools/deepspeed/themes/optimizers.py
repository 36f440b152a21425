"""Which optimizer of torch stands for which of DeepSpeed's, and what each takes. Torch itself is not imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
_OF_ADAM = ("torch_adam", "adam_w_mode", "bias_correction", "max_grad_norm")


@dataclass(frozen=True)
class Counterpart:
    """A class of torch.optim for an optimizer of DeepSpeed.

    Attributes:
        name: of the class.
        defaults: arguments that are always written, with DeepSpeed's defaults.
        more: further arguments, which are written where they are given.
        others: keys of the file that are no arguments of the class.
        differs: how it differs; empty = it computes the same.
    """

    name: str
    defaults: dict[str, Any]
    more: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    differs: str = ""

    @property
    def target(self) -> str:
        """Path of the class."""
        return f"torch.optim.{self.name}"

    @property
    def group(self) -> str:
        """Choice of the group `optimizer` to build on: one that has no other arguments than `defaults`."""
        return "adamw" if "betas" in self.defaults else "sgd" if "momentum" in self.defaults else "adagrad"

    @property
    def allowed(self) -> tuple[str, ...]:
        """Mapped keys that `optimizer.params` may have."""
        return (*self.defaults, *self.more, *self.others)


def _of_torch(name: str, lr: float, *more: str, **defaults: Any) -> Counterpart:
    """Return a class of torch itself, whose weight decay is 0 by default; it can maximize."""
    return Counterpart(name, {"lr": lr, **defaults, "weight_decay": 0.0}, (*more, "maximize"))


_BETAS = [0.9, 0.999]
# Names of DeepSpeed, in any case, and of classes of torch.optim, whose defaults are torch's.
OWN = {
    "Adam": Counterpart("AdamW", _ADAM, ("amsgrad", "maximize"), _OF_ADAM),
    "AdamW": Counterpart("AdamW", _ADAM, ("amsgrad", "maximize"), _OF_ADAM),
    "Adagrad": Counterpart(
        "Adagrad",
        {"lr": 1e-2, "weight_decay": 0.0},
        ("eps", "lr_decay", "initial_accumulator_value", "maximize"),
        ("amsgrad",),
    ),
    "OneBitAdam": Counterpart(
        "AdamW",
        _ADAM,
        ("maximize",),
        (*_OF_ADAM, "amsgrad", "freeze_step"),
        "1-bit Adam in DeepSpeed does not correct its averages at the beginning; AdamW does.",
    ),
    "ZeroOneAdam": Counterpart(
        "AdamW",
        _ADAM,
        ("maximize",),
        (*_OF_ADAM, "amsgrad", "freeze_step", "var_freeze_step"),
        "As 1-bit Adam: signs of momentum are exchanged at every step; 0/1 Adam skips some.",
    ),
}
TORCH = {
    "SGD": _of_torch("SGD", 1e-3, "dampening", "nesterov", momentum=0.0),
    "RMSprop": _of_torch("RMSprop", 1e-2, "alpha", "eps", "centered", momentum=0.0),
    "Adamax": _of_torch("Adamax", 2e-3, "eps", betas=_BETAS),
    "NAdam": _of_torch("NAdam", 2e-3, "eps", "momentum_decay", "decoupled_weight_decay", betas=_BETAS),
    "RAdam": _of_torch("RAdam", 1e-3, "eps", "decoupled_weight_decay", betas=_BETAS),
    "Adadelta": _of_torch("Adadelta", 1.0, "rho", "eps"),
    "ASGD": _of_torch("ASGD", 1e-2, "lambd", "alpha", "t0"),
    "Adafactor": _of_torch("Adafactor", 1e-2, "beta2_decay", "eps", "d"),
}
# Names of DeepSpeed, in any case, without a counterpart -> why.
_MISSING = ("OneBitLamb", "Lamb", "Lion", "MuAdam", "MuAdamW", "MuSGD")
NO_COUNTERPART = {name: f"torch has no {name}." for name in _MISSING}
NO_COUNTERPART["Muon"] = "DeepSpeed's Muon steps matrices, and all else with Adam; torch's Muon takes matrices alone."


def known_name(name: str) -> str | None:
    """Return the name as DeepSpeed writes it; None if DeepSpeed does not have it."""
    own = next((own for own in (*OWN, *NO_COUNTERPART) if own.lower() == name.lower()), None)
    return own or (name if name in TORCH else None)


def names() -> list[str]:
    """Return all names."""
    return sorted({*OWN, *TORCH, *NO_COUNTERPART})
