"""optimizer and gradient_clipping: the group `optimizer`, `compression=onebit`, `trainer.gradient_clip_val`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainwright.core.problems import did_you_mean
from trainwright.tools.deepspeed.table import APPROXIMATED, AUTO, KEYS, MAPPED, UNSUPPORTED
from trainwright.tools.deepspeed.themes.layout import RequestedLayout
from trainwright.tools.deepspeed.translation import Translation

_BETAS = [0.9, 0.999]
_ADAM = {"lr": 1e-3, "betas": _BETAS, "eps": 1e-8, "weight_decay": 0.0}
_OF_ADAM = ("torch_adam", "adam_w_mode", "bias_correction", "max_grad_norm")


@dataclass(frozen=True)
class Counterpart:
    """Class of torch.optim for an optimizer of DeepSpeed.

    Attributes:
        name: of the class.
        defaults: arguments that are always written, with DeepSpeed's defaults.
        more: further arguments, written if given.
        others: keys of the file that are not arguments of the class.
        differs: how it differs; empty: not at all.
    """

    name: str
    defaults: dict[str, Any]
    more: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    differs: str = ""

    @property
    def group(self) -> str:
        """Choice of the group `optimizer` whose arguments are all in `defaults`."""
        return "adamw" if "betas" in self.defaults else "sgd" if "momentum" in self.defaults else "adagrad"

    @property
    def allowed(self) -> tuple[str, ...]:
        """Mapped keys allowed in `optimizer.params`."""
        return (*self.defaults, *self.more, *self.others)


def _torch_class(name: str, lr: float, *more: str, **defaults: Any) -> Counterpart:
    """Return a class of torch with its default weight decay of 0."""
    return Counterpart(name, {"lr": lr, **defaults, "weight_decay": 0.0}, (*more, "maximize"))


# Names of DeepSpeed (case-insensitive), then of torch.optim with torch's defaults.
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
        "1-bit Adam in DeepSpeed has no bias correction; AdamW does.",
    ),
    "ZeroOneAdam": Counterpart(
        "AdamW",
        _ADAM,
        ("maximize",),
        (*_OF_ADAM, "amsgrad", "freeze_step", "var_freeze_step"),
        "Like 1-bit Adam: signs of momentum are exchanged at every step; 0/1 Adam skips some.",
    ),
}
TORCH = {
    "SGD": _torch_class("SGD", 1e-3, "dampening", "nesterov", momentum=0.0),
    "RMSprop": _torch_class("RMSprop", 1e-2, "alpha", "eps", "centered", momentum=0.0),
    "Adamax": _torch_class("Adamax", 2e-3, "eps", betas=_BETAS),
    "NAdam": _torch_class("NAdam", 2e-3, "eps", "momentum_decay", "decoupled_weight_decay", betas=_BETAS),
    "RAdam": _torch_class("RAdam", 1e-3, "eps", "decoupled_weight_decay", betas=_BETAS),
    "Adadelta": _torch_class("Adadelta", 1.0, "rho", "eps"),
    "ASGD": _torch_class("ASGD", 1e-2, "lambd", "alpha", "t0"),
    "Adafactor": _torch_class("Adafactor", 1e-2, "beta2_decay", "eps", "d"),
}
# Names of DeepSpeed (case-insensitive) without a counterpart -> reason.
_MISSING = ("OneBitLamb", "Lamb", "Lion", "MuAdam", "MuAdamW", "MuSGD")
NO_COUNTERPART = {name: f"torch has no {name}." for name in _MISSING}
NO_COUNTERPART["Muon"] = "DeepSpeed's Muon uses Adam for other parameters than matrices; torch's has no such fallback."


_NAMES = (*OWN, *TORCH, *NO_COUNTERPART)
TYPE = "optimizer.type"
CLIPPING = "gradient_clipping"
_PARAMS = "optimizer.params"
_OWN = (
    "The module configures its own optimizer, which is used. For a module with such an argument, write `optimizer: "
    "${optimizer}` under module in the recipe."
)
_INSTEAD = (
    "Type optimizer=adamw (or another) to train with that, or write a yaml of the group optimizer with a class "
    "of your own."
)
# Optimizers with compressed gradients -> key of the warm-up steps.
_ONE_BIT = {"OneBitAdam": f"{_PARAMS}.freeze_step", "ZeroOneAdam": f"{_PARAMS}.var_freeze_step"}
_MOST_STEPS = 100_000  # DeepSpeed's default of freeze_step


def translate_optimizer(t: Translation, chosen: RequestedLayout, precision: str) -> None:
    """Decide the optimizer and, for 1-bit Adam, the compression."""
    name = _name(t)
    if name is None:
        return
    known = OWN.get(name) or TORCH.get(name)
    params = {path.removeprefix(f"{_PARAMS}."): t.value(path) for path in t.paths(_PARAMS) if path in KEYS}
    allowed = known.allowed if known else tuple(params)
    for wrong in sorted(params.keys() - set(allowed)):
        t.refuse(f"{_PARAMS}.{wrong}: {name} has no such argument; {did_you_mean(wrong, allowed, 'arguments')}")
    if name in _ONE_BIT:
        _one_bit(t, _ONE_BIT[name], chosen, precision)
    own = t.recipe is not None and not t.recipe.takes_optimizer
    if known is not None and not own:
        _write(t, name, known, params)
        return
    if not own and "optimizer" in t.typed:
        t.set("optimizer", name, by=TYPE)  # the report shows the typed override
    why = _OWN if own else f"{NO_COUNTERPART[name]} {_INSTEAD}"
    t.say(TYPE, UNSUPPORTED, why, stops=not own)
    for param in params.keys() - {"freeze_step", "var_freeze_step"}:
        t.say(f"{_PARAMS}.{param}", UNSUPPORTED, f"See {TYPE}.")


def _name(t: Translation) -> str | None:
    given = t.value(TYPE)
    if given is None:
        if t.paths(_PARAMS):
            t.refuse(f"{_PARAMS} without {TYPE}; {did_you_mean('', _NAMES, 'optimizers')}")
        return None
    spellings = {name.lower(): name for name in (*OWN, *NO_COUNTERPART)} | {name: name for name in TORCH}
    name = spellings.get(given.lower()) or spellings.get(given)
    if name is None:
        t.refuse(
            f"{TYPE} is {given!r}; {did_you_mean(given, _NAMES, 'optimizers')}. For another class write a yaml of the "
            "group optimizer, and remove the section"
        )
    return name


def _write(t: Translation, name: str, known: Counterpart, params: dict[str, Any]) -> None:
    is_adam = name == "Adam" and params.get("adam_w_mode") is False
    target = "torch.optim.Adam" if is_adam else f"torch.optim.{known.name}"
    t.set("optimizer", known.group, by=TYPE)
    t.set("optimizer._target_", target, by=TYPE)
    note = known.differs
    if name == "Adam" and not is_adam:
        note = "DeepSpeed's Adam decouples weight decay unless adam_w_mode is false"
    t.say(TYPE, APPROXIMATED if known.differs else MAPPED, note)
    written = dict.fromkeys([*known.defaults, *(param for param in params if param in known.more)])
    for argument in written:
        path = f"{_PARAMS}.{argument}"
        value = _argument(t, path, known.defaults.get(argument))
        t.set(f"optimizer.{argument}", value, by=path if t.has(path) else TYPE)
    t.say(f"{_PARAMS}.adam_w_mode", MAPPED, target)
    if t.recipe is not None and "optimizer" not in t.typed:
        for stale in sorted(t.recipe.own_optimizer_keys - {*written, "_target_", "_partial_"}):
            t.remove(f"optimizer.{stale}")


def _argument(t: Translation, path: str, default: Any) -> Any:
    value = t.value(path, default)
    if value != AUTO:
        return value
    name = path.rpartition(".")[2]
    if t.recipe is None or (name not in t.recipe.optimizer and default is None):
        t.needs_recipe(path, "write a number")
    return default if t.recipe is None else t.recipe.optimizer.get(name, default)


def _one_bit(t: Translation, path: str, chosen: RequestedLayout, precision: str) -> None:
    """Decide the compression of 1-bit Adam."""
    reason = _no_compression(chosen, precision)
    if reason and t.typed.over("compression") is None:
        note = f"Gradients are not compressed: {reason}"
        if t.has(path):
            t.say(path, UNSUPPORTED, note)
        else:
            t.note_absent(path, note)
        return
    by = path if t.has(path) else TYPE
    t.set("compression", "onebit", by=by)
    t.set("compression.warmup_steps", t.value(path, _MOST_STEPS), by=by)


def _no_compression(chosen: RequestedLayout, precision: str) -> str:
    if precision == "16-mixed":
        return (
            "1-bit Adam does not work with loss scaling, which rescales momentum. Type precision=bf16-mixed "
            "to use both."
        )
    if not chosen.replicates:
        return (
            "there are no replicas that average whole gradients. Write stage 0, or type strategy.replicate=2 for "
            "several copies of the sharded state."
        )
    return ""


def translate_clipping(t: Translation) -> None:
    """Decide how gradients are clipped."""
    value, old = t.value(CLIPPING), f"{_PARAMS}.max_grad_norm"
    if value == AUTO:
        if t.recipe is None:
            t.needs_recipe(CLIPPING, "write a number")
        else:
            t.say(CLIPPING, MAPPED, f"trainer.gradient_clip_val={t.recipe.gradient_clip_val} of the recipe")
    elif value is not None:
        t.set("trainer.gradient_clip_val", float(value) if value else None, by=CLIPPING)
        if value:
            t.set("trainer.gradient_clip_algorithm", "norm", by=CLIPPING)
    elif t.value(old):
        t.set("trainer.gradient_clip_val", float(t.value(old)), by=old)
        t.say(old, APPROXIMATED, "Current DeepSpeed refuses it.")
    else:
        native = "as in the recipe" if t.recipe is None else f"trainer.gradient_clip_val={t.recipe.gradient_clip_val}"
        t.note_absent(
            CLIPPING,
            f"DeepSpeed documents clipping at 1.0 by default; older versions do not clip. Here: {native}. Type "
            "trainer.gradient_clip_val=1.0 or =null.",
        )
