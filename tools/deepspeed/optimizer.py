"""optimizer and gradient_clipping: the group `optimizer`, `compression=onebit`, `trainer.gradient_clip_val`."""

from __future__ import annotations

from typing import Any

from trainwright.core.problems import did_you_mean
from trainwright.tools.deepspeed.key import APPROXIMATED, AUTO, MAPPED, UNSUPPORTED
from trainwright.tools.deepspeed.layout import Chosen
from trainwright.tools.deepspeed.optimizers import Counterpart, counterpart, names
from trainwright.tools.deepspeed.translation import Translation

TYPE = "optimizer.type"
_PARAMS = "optimizer.params"
CLIPPING = "gradient_clipping"
_OWN = (
    "The module configures its own optimizer, which is used. For a module that takes one, write `optimizer: "
    "${optimizer}` under module in the recipe."
)
_MOST_STEPS = 100_000  # DeepSpeed's default of freeze_step


def translate_optimizer(t: Translation, chosen: Chosen, precision: str) -> None:
    """Decide the optimizer and, for 1-bit Adam, the compression."""
    found = _known(t)
    if found is None:
        return
    name, known = found
    params = {path.removeprefix(f"{_PARAMS}."): t.value(path) for path in t.paths(_PARAMS)}
    for wrong in sorted(params.keys() - set(known.allowed)):
        t.refuse(f"{_PARAMS}.{wrong}: {name} takes no such argument; {did_you_mean(wrong, known.allowed, 'arguments')}")
    if known.compressed:
        _one_bit(t, name, chosen, precision)
    if t.recipe is not None and not t.recipe.takes_optimizer:
        for path in [TYPE, *t.paths(_PARAMS)]:
            if path.rsplit(".", 1)[1] not in ("freeze_step", "var_freeze_step"):
                t.say(path, UNSUPPORTED, _OWN, stops=False)
    elif not known.target:
        if "optimizer" in t.typed:
            t.set("optimizer", name, by=TYPE)  # so that the report shows what was typed in its place
        t.say(TYPE, UNSUPPORTED, known.why, stops=True)
        for path in t.paths(_PARAMS):
            t.say(path, UNSUPPORTED, f"Of {name}, which is not to be had.", stops=False)
    else:
        _write(t, name, known, params)


def _known(t: Translation) -> tuple[str, Counterpart] | None:
    given = t.value(TYPE)
    if not isinstance(given, str):
        if t.paths(_PARAMS):
            t.refuse(f"{_PARAMS} without {TYPE}: of which optimizer? {did_you_mean('', names(), 'optimizers')}")
        elif t.recipe is not None:
            t.note_absent("optimizer", f"That of the recipe {t.recipe.name!r} stays.")
        return None
    found = counterpart(given)
    if found is None:
        t.refuse(
            f"{TYPE} is {given!r}; {did_you_mean(given, names(), 'optimizers')}. For another class write a yaml of the "
            "group optimizer, and take the section out"
        )
    return found


def _write(t: Translation, name: str, known: Counterpart, params: dict[str, Any]) -> None:
    target = known.target
    if name == "Adam" and params.get("adam_w_mode", True) is False:
        target = "torch.optim.Adam"
    t.set("optimizer", known.group, by=TYPE)
    t.set("optimizer._target_", target, by=TYPE)
    status = APPROXIMATED if known.why else MAPPED
    decoupled = name == "Adam" and target.endswith("AdamW")
    t.say(
        TYPE,
        status,
        known.why or ("Adam there decouples weight decay, unless adam_w_mode is false" if decoupled else ""),
    )
    written = {"_target_", "_partial_"}
    for argument in dict.fromkeys([*known.defaults, *(p for p in params if p in known.more)]):
        path = f"{_PARAMS}.{argument}"
        value = _argument(t, path, known.defaults.get(argument))
        written.add(argument)
        t.set(f"optimizer.{argument}", value, by=path if t.has(path) else TYPE)
        t.say(path, MAPPED)
    for path in (f"{_PARAMS}.torch_adam", f"{_PARAMS}.adam_w_mode"):
        if t.has(path):
            t.say(path, MAPPED, f"{target}")
    if t.recipe is not None and "optimizer" not in t.typed:
        for stale in sorted(t.recipe.own_optimizer_keys - written):
            t.remove(f"optimizer.{stale}")


def _argument(t: Translation, path: str, default: Any) -> Any:
    value = t.value(path, default)
    if value != AUTO:
        return value
    name = path.rsplit(".", 1)[1]
    if t.recipe is None:
        t.needs_recipe(path, "write a number")
        return default
    if name in t.recipe.optimizer:
        return t.recipe.optimizer[name]
    if default is None:
        t.needs_recipe(path, "write a number")
    return default


def _one_bit(t: Translation, name: str, chosen: Chosen, precision: str) -> None:
    """Compression of 1-bit Adam, where it can be had."""
    path = f"{_PARAMS}.{'var_freeze_step' if name == 'ZeroOneAdam' else 'freeze_step'}"
    by = path if t.has(path) else TYPE
    reason = _no_compression(chosen, precision)
    if reason and t.typed.over("compression") is None:
        if t.has(path):
            t.say(path, UNSUPPORTED, f"Gradients are averaged as they are: {reason}")
        else:
            t.note_absent(path, f"Gradients are averaged as they are: {reason}")
        return
    t.set("compression", "onebit", by=by)
    t.set("compression.warmup_steps", int(t.value(path, _MOST_STEPS)), by=by)
    t.say(path, MAPPED if name == "OneBitAdam" else APPROXIMATED)


def _no_compression(chosen: Chosen, precision: str) -> str:
    if precision == "16-mixed":
        return (
            "1-bit Adam cannot be had with scaled losses, whose momentum has no fixed scale. Type precision=bf16-mixed "
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
    elif isinstance(value, (int, float)):
        if value < 0:
            t.refuse(f"{CLIPPING} is {value}; must be at least 0, which turns it off")
        t.set("trainer.gradient_clip_val", float(value) if value else None, by=CLIPPING)
        if value:
            t.set("trainer.gradient_clip_algorithm", "norm", by=CLIPPING)
        t.say(CLIPPING, MAPPED)
    elif t.value(old):
        t.set("trainer.gradient_clip_val", float(t.value(old)), by=old)
        t.say(old, APPROXIMATED)
    else:
        here = "as the recipe says" if t.recipe is None else f"trainer.gradient_clip_val={t.recipe.gradient_clip_val}"
        t.note_absent(
            CLIPPING,
            f"By its documentation DeepSpeed clips at 1.0 then; older versions do not. Here: {here}. Type "
            "trainer.gradient_clip_val=1.0 or =null for the one that is meant.",
        )
