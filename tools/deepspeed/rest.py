"""Communication, logging, monitors and checkpoints."""

from __future__ import annotations

from importlib.util import find_spec

from trainwright.tools.deepspeed.key import APPROXIMATED, MAPPED, UNSUPPORTED
from trainwright.tools.deepspeed.layout import Chosen
from trainwright.tools.deepspeed.translation import Translation

_LOGGERS = {
    "wandb": ("wandb", "WandbLogger", {"project": "project", "team": "entity", "group": "group"}),
    "comet": (
        "comet_ml",
        "CometLogger",
        {
            "project": "project",
            "workspace": "workspace",
            "experiment_key": "experiment_key",
            "online": "online",
            "mode": "mode",
        },
    ),
}


def translate_communication(t: Translation, chosen: Chosen, precision: str) -> None:
    """Decide how gradients travel."""
    path = "communication_data_type"
    dtype = t.value(path)
    if dtype is None or dtype not in ("fp16", "bf16", "fp32"):
        return
    if dtype == "fp32":
        t.say(path, *((MAPPED, "gradients are float32 and are averaged so") if precision != "bf16-true" else _BF16))
    elif t.is_set("compression"):
        t.say(path, APPROXIMATED, "After the warm-up, signs of momentum are sent.")
    elif chosen.replicates:
        t.set("compression", dtype, by=path)
        t.say(path, MAPPED)
    else:
        t.say(
            path,
            UNSUPPORTED,
            "Within a shard group gradients are reduced as they are. For several copies, which average in "
            f"{dtype}, type strategy.replicate=2 compression={dtype}.",
        )


_BF16 = (APPROXIMATED, "Gradients are bfloat16 with precision=bf16-true, and are averaged so.")


def translate_watching(t: Translation) -> None:
    """Decide logging, loggers and what is watched."""
    _steps_per_print(t)
    for path, key, value in (
        ("comms_logger.enabled", "monitor", "communication"),
        ("checkpoint.writer.decoupled", "checkpoint", "async"),
        ("nebula.enabled", "checkpoint", "async"),
        ("datastates_ckpt", "checkpoint", "async"),
    ):
        if t.value(path):
            t.set(key, value, by=path)
            t.say(path)
    for path in ("wall_clock_breakdown", "memory_breakdown"):
        if t.value(path):
            t.say(path, MAPPED, t.given.keys[path].note)
    _tensorboard(t)
    for section in _LOGGERS:
        _logger(t, section)


def _steps_per_print(t: Translation) -> None:
    path = "steps_per_print"
    steps = t.value(path)
    if not isinstance(steps, int):
        return
    if steps < 1:
        t.refuse(f"{path} is {steps}; must be at least 1")
        return
    t.set("trainer.log_every_n_steps", steps, by=path)
    t.say(path)


def _tensorboard(t: Translation) -> None:
    if not t.value("tensorboard.enabled"):
        return
    t.set("logger", "default", by="tensorboard.enabled")
    t.say("tensorboard.enabled", MAPPED)
    for name, key in (("output_path", "save_dir"), ("job_name", "name")):
        path = f"tensorboard.{name}"
        if t.value(path):
            t.set(f"logger.tensorboard.{key}", t.value(path), by=path)
            t.say(path, MAPPED)


def _logger(t: Translation, section: str) -> None:
    package, cls, arguments = _LOGGERS[section]
    enabled = f"{section}.enabled"
    if not t.value(enabled):
        return
    if find_spec(package) is None:
        for path in t.paths(section):
            if not t.given.keys[path].secret:
                t.say(path, UNSUPPORTED, f"The package {package} is not installed: pip install {package}.")
        return
    t.set(f"logger.{section}._target_", f"lightning.pytorch.loggers.{cls}", by=enabled)
    t.say(enabled, MAPPED)
    for name, argument in arguments.items():
        path = f"{section}.{name}"
        if t.has(path):
            t.set(f"logger.{section}.{argument}", t.value(path), by=path)
            t.say(path, MAPPED)
