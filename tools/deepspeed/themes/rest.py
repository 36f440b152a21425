"""communication_data_type, steps_per_print and loggers: `compression`, `trainer.log_every_n_steps` and `logger`."""

from __future__ import annotations

from importlib.util import find_spec

from trainwright.tools.deepspeed.key import APPROXIMATED, MAPPED, UNSUPPORTED
from trainwright.tools.deepspeed.table import KEYS
from trainwright.tools.deepspeed.themes.layout import Chosen
from trainwright.tools.deepspeed.translation import Translation

# Section -> class of lightning.pytorch.loggers, and the package that it needs.
_LOGGERS = {"wandb": ("WandbLogger", "wandb"), "comet": ("CometLogger", "comet_ml")}


def translate_communication(t: Translation, chosen: Chosen, precision: str) -> None:
    """Decide how gradients are sent."""
    path = "communication_data_type"
    dtype = t.value(path)
    if dtype is None:
        return
    if dtype == "fp32":
        exact = precision != "bf16-true"
        t.say(
            path, MAPPED if exact else APPROXIMATED, f"Gradients are averaged in {'float32' if exact else 'bfloat16'}."
        )
    elif t.is_set("compression"):
        t.say(path, APPROXIMATED, "After the warm-up, signs of momentum are sent.")
    elif chosen.replicates:
        t.set("compression", dtype, by=path)
    else:
        t.say(
            path,
            UNSUPPORTED,
            "Within a shard group gradients are reduced as they are. For several copies, which average in "
            f"{dtype}, type strategy.replicate=2 compression={dtype}.",
        )


def translate_logging(t: Translation) -> None:
    """Decide what is logged, and where."""
    path = "steps_per_print"
    if t.has(path):
        t.set("trainer.log_every_n_steps", t.value(path), by=path)
    if t.value("tensorboard.enabled"):
        t.set("logger", "default", by="tensorboard.enabled")
        _copy(t, "tensorboard")
    for section, (cls, package) in _LOGGERS.items():
        enabled = f"{section}.enabled"
        if not t.value(enabled):
            continue
        if find_spec(package) is None:
            t.say(enabled, UNSUPPORTED, f"The package {package} is not installed: pip install {package}.")
            continue
        t.set(f"logger.{section}._target_", f"lightning.pytorch.loggers.{cls}", by=enabled)
        _copy(t, section)


def _copy(t: Translation, section: str) -> None:
    for path in t.paths(section):
        if path in KEYS and KEYS[path].becomes and t.value(path) != "":
            t.set(f"logger.{section}.{KEYS[path].becomes}", t.value(path), by=path)
