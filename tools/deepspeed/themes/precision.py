"""fp16, bf16, torch_autocast and amp: `precision` and `trainer.loss_scale`."""

from __future__ import annotations

from typing import Any

from trainwright.tools.deepspeed.table import AUTO, MAPPED, UNSUPPORTED
from trainwright.tools.deepspeed.translation import Translation

_MODES = ("fp16", "bf16", "bfloat16", "torch_autocast", "amp")
_HALF = ("float16", "fp16", "half", "torch.float16")
_DYNAMIC_POWER = 16  # the native default


def translate_precision(t: Translation) -> str:
    """Decide the precision.

    Returns:
        The precision of the run, typed or not.
    """
    on = [mode for mode in _MODES if _is_on(t, mode)]
    if "bf16" in on and "bfloat16" in on:
        on.remove("bfloat16")
    if len(on) > 1:
        modes = " and ".join(f"{mode}.enabled" for mode in on)
        t.refuse(f"{modes} are both on; DeepSpeed allows one, turn the others off")
    chosen = _chosen(t, on[0]) if on else None
    asked = [f"{mode}.enabled" for mode in _MODES if t.has(f"{mode}.enabled")]
    if chosen is not None:
        t.set("precision", chosen, by=f"{on[0]}.enabled")
    elif asked and not any(map(t.is_auto, asked)):
        t.set("precision", "32", by=asked[0])
        t.say(asked[0], MAPPED, "off")
    elif not asked:
        known = "" if t.recipe is None else f", which has precision={t.recipe.precision}"
        t.note_absent("fp16, bf16", f"DeepSpeed computes in float32 by default; here the recipe decides{known}.")
    for path in asked:
        if t.is_auto(path) and path.split(".")[0] not in on:
            t.say(path, MAPPED, "off, as in the precision of the run")
    precision = _effective(t, chosen if chosen is not None else "32" if asked else None)
    if "torch_autocast" in on:
        t.say("torch_autocast.dtype")
    _loss_scale(t, on, precision)
    _bf16_state(t, on)
    return precision


def _is_on(t: Translation, mode: str) -> bool:
    value = t.value(f"{mode}.enabled", False)
    if value != AUTO:
        return bool(value)
    if t.recipe is None:
        t.needs_recipe(f"{mode}.enabled", "write true or false")
        return False
    on = t.recipe.precision.startswith("16" if mode in ("fp16", "amp") else "bf16")
    t.decide(f"{mode}.enabled", on)
    return on


def _chosen(t: Translation, mode: str) -> str:
    match mode:
        case "fp16":
            return "16-mixed"
        case "torch_autocast":
            return "16-mixed" if t.value("torch_autocast.dtype", "bfloat16") in _HALF else "bf16-mixed"
        case "amp":
            return "32" if t.value("amp.opt_level") == "O0" else "16-mixed"
    if t.is_auto(f"{mode}.enabled") and t.recipe is not None:
        return t.recipe.precision
    both = t.value(f"{mode}.bf16_master_weights_and_grads") and t.value(f"{mode}.bf16_optimizer_states")
    return "bf16-true" if both else "bf16-mixed"


def _effective(t: Translation, chosen: str | None) -> str:
    typed = t.typed.value("precision")
    if typed is not None:
        return str(typed)
    if chosen is not None:
        return chosen
    return "32" if t.recipe is None else t.recipe.precision


def _loss_scale(t: Translation, on: list[str], precision: str) -> None:
    mode = next((mode for mode in ("fp16", "amp") if mode in on), None)
    if mode is None or precision != "16-mixed":
        return
    scale: Any = t.value(f"{mode}.loss_scale", 0)
    if scale and not isinstance(scale, str):
        t.set("trainer.loss_scale.initial", float(scale), by=f"{mode}.loss_scale")
        t.set("trainer.loss_scale.fixed", True, by=f"{mode}.loss_scale")
        t.say(f"{mode}.loss_scale", MAPPED, "The scale is fixed; steps with overflowing gradients are dropped.")
        return
    t.say(f"{mode}.loss_scale", MAPPED, "dynamic")
    if mode == "fp16":
        _dynamic(t)


def _dynamic(t: Translation) -> None:
    power, window = t.value("fp16.initial_scale_power", _DYNAMIC_POWER), t.value("fp16.loss_scale_window", 1000)
    if not 0 <= power <= 127:
        t.refuse(f"fp16.initial_scale_power is {power}; must be 0 to 127, since the scale is 2 to this power")
        return
    if power != _DYNAMIC_POWER:
        t.set("trainer.loss_scale.initial", float(2**power), by="fp16.initial_scale_power")
    t.set("trainer.loss_scale.growth_interval", window, by="fp16.loss_scale_window")
    t.set("trainer.loss_scale.least", float(t.value("fp16.min_loss_scale", 1)), by="fp16.min_loss_scale")


def _bf16_state(t: Translation, on: list[str]) -> None:
    for mode in [mode for mode in on if mode.startswith("bf")]:
        paths = [f"{mode}.{name}" for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")]
        asked = [path for path in paths if t.value(path)]
        for path in asked:
            if asked == paths:
                t.say(path)
            else:
                why = "Weights, gradients and state have one dtype: precision=bf16-true uses bfloat16 for all."
                t.say(path, UNSUPPORTED, why)
