"""`monitor.profile=[10,20]`, spelt out as the callback that it stands for."""

from omegaconf import DictConfig, ListConfig, OmegaConf

_KEY = "monitor.profile"
_TARGET = "trainwright.callbacks.monitor.trace.profile.Profile"


def spell_out_profile(cfg: DictConfig) -> list[str]:
    """Put the callback in the place of the steps: `[]` is a trace only when a running job is asked for one.

    Args:
        cfg: composed; changed. What is no list stays as it is.

    Returns:
        What is wrong with the steps.
    """
    given = OmegaConf.select(cfg, _KEY)
    if not isinstance(given, ListConfig):
        return []
    steps = list(given)
    node = {"_target_": _TARGET, "steps": steps or None, "run_dir": "${run_dir}"}
    OmegaConf.update(cfg, _KEY, node, merge=False, force_add=True)
    if not steps or _are_steps(steps):
        return []
    return [
        f"{_KEY}={steps} (allowed: two whole numbers, the first optimizer step of the trace and the one after its "
        "last, like [10,20]; [] = only when a running job is asked; null = off)"
    ]


def _are_steps(steps: list[object]) -> bool:
    whole = [each for each in steps if isinstance(each, int) and not isinstance(each, bool)]
    return len(steps) == len(whole) == 2 and 0 <= whole[0] < whole[1]
