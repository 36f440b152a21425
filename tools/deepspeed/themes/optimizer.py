"""optimizer and gradient_clipping: the group `optimizer`, `compression=onebit`, `trainer.gradient_clip_val`."""

from __future__ import annotations

from typing import Any

from trainwright.core.problems import did_you_mean
from trainwright.tools.deepspeed.key import APPROXIMATED, AUTO, MAPPED, UNSUPPORTED
from trainwright.tools.deepspeed.table import KEYS
from trainwright.tools.deepspeed.themes.layout import Chosen
from trainwright.tools.deepspeed.themes.optimizers import NO_COUNTERPART, OWN, TORCH, Counterpart, known_name, names
from trainwright.tools.deepspeed.translation import Translation

TYPE = "optimizer.type"
CLIPPING = "gradient_clipping"
_PARAMS = "optimizer.params"
_OWN = (
    "The module configures its own optimizer, which is used. For a module that takes one, write `optimizer: "
    "${optimizer}` under module in the recipe."
)
_INSTEAD = (
    "Type optimizer=adamw (or another) to train with that, or write a yaml of the group optimizer that names a class "
    "of your own."
)
# Optimizers that send compressed gradients -> the key that has their steps before that.
_ONE_BIT = {"OneBitAdam": f"{_PARAMS}.freeze_step", "ZeroOneAdam": f"{_PARAMS}.var_freeze_step"}
_MOST_STEPS = 100_000  # DeepSpeed's default of freeze_step


def translate_optimizer(t: Translation, chosen: Chosen, precision: str) -> None:
    """Decide the optimizer and, for 1-bit Adam, the compression."""
    name = _name(t)
    if name is None:
        return
    known = OWN.get(name) or TORCH.get(name)
    params = {path.removeprefix(f"{_PARAMS}."): t.value(path) for path in t.paths(_PARAMS) if path in KEYS}
    allowed = known.allowed if known else tuple(params)
    for wrong in sorted(params.keys() - set(allowed)):
        t.refuse(f"{_PARAMS}.{wrong}: {name} takes no such argument; {did_you_mean(wrong, allowed, 'arguments')}")
    if name in _ONE_BIT:
        _one_bit(t, _ONE_BIT[name], chosen, precision)
    own = t.recipe is not None and not t.recipe.takes_optimizer
    if known is not None and not own:
        _write(t, name, known, params)
        return
    if not own and "optimizer" in t.typed:
        t.set("optimizer", name, by=TYPE)  # so that the report shows what was typed in its place
    why = _OWN if own else f"{NO_COUNTERPART[name]} {_INSTEAD}"
    t.say(TYPE, UNSUPPORTED, why, stops=not own)
    for param in params.keys() - {"freeze_step", "var_freeze_step"}:
        t.say(f"{_PARAMS}.{param}", UNSUPPORTED, f"See {TYPE}.")


def _name(t: Translation) -> str | None:
    given = t.value(TYPE)
    if given is None:
        if t.paths(_PARAMS):
            t.refuse(f"{_PARAMS} without {TYPE}: of which optimizer? {did_you_mean('', names(), 'optimizers')}")
        return None
    name = known_name(given)
    if name is None:
        t.refuse(
            f"{TYPE} is {given!r}; {did_you_mean(given, names(), 'optimizers')}. For another class write a yaml of the "
            "group optimizer, and take the section out"
        )
    return name


def _write(t: Translation, name: str, known: Counterpart, params: dict[str, Any]) -> None:
    target = known.target
    if name == "Adam" and params.get("adam_w_mode") is False:
        target = "torch.optim.Adam"
    t.set("optimizer", known.group, by=TYPE)
    t.set("optimizer._target_", target, by=TYPE)
    decoupled = name == "Adam" and target.endswith("AdamW")
    note = known.differs or ("DeepSpeed's Adam decouples weight decay unless adam_w_mode is false" if decoupled else "")
    t.say(TYPE, APPROXIMATED if known.differs else MAPPED, note)
    written = {"_target_", "_partial_"}
    for argument in dict.fromkeys([*known.defaults, *(p for p in params if p in known.more)]):
        path = f"{_PARAMS}.{argument}"
        written.add(argument)
        t.set(
            f"optimizer.{argument}", _argument(t, path, known.defaults.get(argument)), by=path if t.has(path) else TYPE
        )
    t.say(f"{_PARAMS}.adam_w_mode", MAPPED, target)
    if t.recipe is not None and "optimizer" not in t.typed:
        for stale in sorted(t.recipe.own_optimizer_keys - written):
            t.remove(f"optimizer.{stale}")


def _argument(t: Translation, path: str, default: Any) -> Any:
    value = t.value(path, default)
    if value != AUTO:
        return value
    name = path.rpartition(".")[2]
    if t.recipe is None or (name not in t.recipe.optimizer and default is None):
        t.needs_recipe(path, "write a number")
    return default if t.recipe is None else t.recipe.optimizer.get(name, default)


def _one_bit(t: Translation, path: str, chosen: Chosen, precision: str) -> None:
    """Decide the compression of 1-bit Adam."""
    reason = _no_compression(chosen, precision)
    if reason and t.typed.over("compression") is None:
        note = f"Gradients are averaged as they are: {reason}"
        if t.has(path):
            t.say(path, UNSUPPORTED, note)
        else:
            t.note_absent(path, note)
        return
    by = path if t.has(path) else TYPE
    t.set("compression", "onebit", by=by)
    t.set("compression.warmup_steps", t.value(path, _MOST_STEPS), by=by)


def _no_compression(chosen: Chosen, precision: str) -> str:
    if precision == "16-mixed":
        return (
            "1-bit Adam does not work with scaled losses, whose momentum has no fixed scale. Type precision=bf16-mixed "
            "beside the file for both."
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
        here = "as the recipe says" if t.recipe is None else f"trainer.gradient_clip_val={t.recipe.gradient_clip_val}"
        t.note_absent(
            CLIPPING,
            f"By its documentation DeepSpeed clips at 1.0 then; older versions do not. Here: {here}. Type "
            "trainer.gradient_clip_val=1.0 or =null for the one that is meant.",
        )
