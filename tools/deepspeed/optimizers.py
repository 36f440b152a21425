"""Which optimizer of torch stands for which of DeepSpeed's, and what each takes. Torch itself is not imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# How torch runs an update; what is computed does not depend on it.
_TECHNICAL = ("foreach", "fused", "capturable", "differentiable", "set_grad_none")
_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
_OF_ADAM = (*_TECHNICAL, "torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states", "max_grad_norm")


@dataclass(frozen=True)
class Counterpart:
    """An optimizer that DeepSpeed knows by name.

    Attributes:
        target: class of torch that does the same; empty = there is none.
        group: choice of the group `optimizer` to build on: one with no other arguments than these.
        defaults: arguments that are always written, as DeepSpeed has them by default.
        more: further arguments that are passed on where they are given.
        others: keys of the file that are no arguments of torch's class.
        why: why there is no counterpart, or how it differs.
        compressed: whether gradients are sent as in 1-bit Adam.
    """

    target: str = ""
    group: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    others: tuple[str, ...] = _TECHNICAL
    why: str = ""
    compressed: bool = False

    @property
    def allowed(self) -> tuple[str, ...]:
        """All keys that `optimizer.params` may have."""
        return (*self.defaults, *self.more, *self.others)


_ONE_BIT = (
    *_OF_ADAM,
    "freeze_step",
    "cuda_aware",
    "comm_backend_name",
    "eps_inside_sqrt",
)
_ZERO_ONE = (*_ONE_BIT, "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
_LAMB = (*_ONE_BIT, "max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
_MUON = (*_OF_ADAM, "momentum", "nesterov", "muon_lr", "adam_lr", "ns_method", "ns_steps", "per_head_muon")
_NONE = (
    "torch has no {name}. Type optimizer=adamw (or another) to train with that, or write a yaml of the group optimizer "
    "that names a class of your own."
)

# Names that DeepSpeed takes in any case.
OWN = {
    "Adam": Counterpart("torch.optim.AdamW", "adamw", _ADAM, ("amsgrad", "maximize"), _OF_ADAM),
    "AdamW": Counterpart("torch.optim.AdamW", "adamw", _ADAM, ("amsgrad", "maximize"), _OF_ADAM),
    "Adagrad": Counterpart(
        "torch.optim.Adagrad",
        "adagrad",
        {"lr": 1e-2, "weight_decay": 0.0},
        ("eps", "lr_decay", "initial_accumulator_value", "maximize"),
        (*_TECHNICAL, "amsgrad", "fp32_optimizer_states"),
    ),
    "OneBitAdam": Counterpart(
        "torch.optim.AdamW",
        "adamw",
        _ADAM,
        ("maximize",),
        (*_ONE_BIT, "amsgrad"),
        "1-bit Adam there does not correct its averages at the beginning; AdamW does.",
        compressed=True,
    ),
    "ZeroOneAdam": Counterpart(
        "torch.optim.AdamW",
        "adamw",
        _ADAM,
        ("maximize",),
        (*_ZERO_ONE, "amsgrad"),
        "As 1-bit Adam: signs of momentum are exchanged at every step; 0/1 Adam leaves out some.",
        compressed=True,
    ),
    "OneBitLamb": Counterpart(defaults=_ADAM, more=("amsgrad",), others=_LAMB, why=_NONE.format(name="LAMB")),
    "Lamb": Counterpart(defaults=_ADAM, more=("amsgrad",), others=_LAMB, why=_NONE.format(name="LAMB")),
    "Lion": Counterpart(defaults=_ADAM, others=_OF_ADAM, why=_NONE.format(name="Lion")),
    "Muon": Counterpart(
        defaults=_ADAM,
        others=_MUON,
        why="DeepSpeed's Muon steps matrices, and all else with Adam; torch's Muon takes matrices alone. Let the "
        "module configure both, or type optimizer=adamw.",
    ),
    "MuAdam": Counterpart(defaults=_ADAM, more=("amsgrad",), others=_OF_ADAM, why=_NONE.format(name="MuAdam")),
    "MuAdamW": Counterpart(defaults=_ADAM, more=("amsgrad",), others=_OF_ADAM, why=_NONE.format(name="MuAdamW")),
    "MuSGD": Counterpart(
        defaults={"lr": 1e-3},
        more=("momentum", "weight_decay", "dampening", "nesterov"),
        why=_NONE.format(name="MuSGD"),
    ),
}

# Classes of torch.optim by their exact names, with torch's own defaults of the arguments that the group's choice has.
TORCH = {
    "SGD": Counterpart(
        "torch.optim.SGD",
        "sgd",
        {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
        ("dampening", "nesterov", "maximize"),
    ),
    "RMSprop": Counterpart(
        "torch.optim.RMSprop",
        "sgd",
        {"lr": 1e-2, "momentum": 0.0, "weight_decay": 0.0},
        ("alpha", "eps", "centered", "maximize"),
    ),
    "Adamax": Counterpart(
        "torch.optim.Adamax",
        "adamw",
        {"lr": 2e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
        ("eps", "maximize"),
    ),
    "NAdam": Counterpart(
        "torch.optim.NAdam",
        "adamw",
        {"lr": 2e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
        ("eps", "momentum_decay", "decoupled_weight_decay", "maximize"),
    ),
    "RAdam": Counterpart(
        "torch.optim.RAdam",
        "adamw",
        {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
        ("eps", "decoupled_weight_decay", "maximize"),
    ),
    "Adadelta": Counterpart(
        "torch.optim.Adadelta",
        "adagrad",
        {"lr": 1.0, "weight_decay": 0.0},
        ("rho", "eps", "maximize"),
    ),
    "ASGD": Counterpart(
        "torch.optim.ASGD",
        "adagrad",
        {"lr": 1e-2, "weight_decay": 0.0},
        ("lambd", "alpha", "t0", "maximize"),
    ),
    "Adafactor": Counterpart(
        "torch.optim.Adafactor",
        "adagrad",
        {"lr": 1e-2, "weight_decay": 0.0},
        ("beta2_decay", "eps", "d", "maximize"),
    ),
}


def counterpart(name: str) -> tuple[str, Counterpart] | None:
    """The name as DeepSpeed writes it and what stands for it; None if DeepSpeed does not know it."""
    own = next((own for own in OWN if own.lower() == name.lower()), None)
    if own is not None:
        return own, OWN[own]
    return (name, TORCH[name]) if name in TORCH else None


def names() -> list[str]:
    """All names that are known."""
    return sorted({*OWN, *TORCH})
