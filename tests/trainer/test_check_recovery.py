"""What is impossible about recovery without restart is refused before a process starts."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from trainwright.strategies.layout import Layout
from trainwright.trainer.check_recovery import recovery_problems

POSSIBLE: dict[str, Any] = {
    "recovery": "replicas",
    "max_restarts": None,
    "min_devices": None,
    "spares": 1,
    "mtbf": 3.0,
}


def problems(verb: str = "fit", layout: Layout | None = None, has_launcher: bool = False, **launch: Any) -> list[str]:
    cfg = OmegaConf.create({"launch": {**POSSIBLE, **launch}})
    return recovery_problems(cfg, verb, layout or Layout(replicate=3), has_launcher)


def test_what_is_possible() -> None:
    assert problems() == []
    assert problems(recovery="restart", spares=0, layout=Layout(shard=2)) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"has_launcher": True}, "under a launcher"),
        ({"verb": "validate"}, "only fit goes on"),
        ({"max_restarts": 0}, "launch=resilient"),
        ({"min_devices": 1}, "leave launch.min_devices out"),
        ({"layout": Layout(shard=2)}, "no other replica has the state"),
        ({"spares": -1}, "launch.spares=-1: must be at least 0"),
        ({"recovery": "restart"}, "takes none that stands ready"),
        ({"mtbf": 0.0}, "launch.mtbf=0.0: must be a number of hours above 0"),
        ({"mtbf": float("inf")}, "launch.mtbf=inf"),
        ({"mtbf": float("nan")}, "launch.mtbf=nan"),
    ],
)
def test_what_is_not(given: dict[str, Any], said: str) -> None:
    [problem] = problems(**given)
    assert said in problem
