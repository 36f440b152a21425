"""What is impossible about recovery without restart is refused before a process starts."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from trainwright.core.layout import Layout
from trainwright.launch.recovery.check_recovery import recovery_problems
from trainwright.strategies.contract.options import PlannedRun
from trainwright.strategies.data.ddp_options import DDPOptions
from trainwright.strategies.data.zero_options import ZeroOptions
from trainwright.strategies.parameter_server.options import ParameterServerOptions

POSSIBLE: dict[str, Any] = {
    "recovery": "replicas",
    "max_restarts": None,
    "min_devices": None,
    "spares": 1,
    "mtbf": 3.0,
}


def problems(verb: str = "fit", layout: Layout | None = None, has_launcher: bool = False, **launch: Any) -> list[str]:
    cfg = OmegaConf.create({"launch": {**POSSIBLE, **launch}})
    return recovery_problems(cfg, verb, DDPOptions(), layout or Layout(replicate=3), has_launcher)


def test_what_is_possible() -> None:
    assert problems() == []
    assert problems(recovery="restart", spares=0, layout=Layout(shard=2)) == []


@pytest.mark.parametrize(("given", "said"), [
    ({"has_launcher": True}, "under a launcher"),
    ({"verb": "validate"}, "only fit can recover"),
    ({"max_restarts": 0}, "launch=resilient"),
    ({"min_devices": 1}, "leave launch.min_devices out"),
    ({"layout": Layout(shard=2)}, "no other replica has the state"),
    ({"recovery": "restart"}, "takes none that stands ready"),
])  # fmt: skip
def test_what_is_not(given: dict[str, Any], said: str) -> None:
    [problem] = problems(**given)
    assert said in problem


def rejoining(strategy: dict[str, Any], verb: str = "fit", **launch: Any) -> tuple[list[str], tuple[int, ...]]:
    """What speaks against it, and which ranks of three can be lost."""
    given = {**POSSIBLE, "recovery": "rejoin", "spares": 0, **launch}
    cfg = OmegaConf.create({"launch": given, "strategy": strategy, "devices": 3})
    options = ParameterServerOptions(**strategy) if "servers" in strategy else ZeroOptions(**strategy)
    return recovery_problems(cfg, verb, options, None, False), PlannedRun(cfg, verb).replaceable_ranks(options)


@pytest.mark.parametrize(("strategy", "verb", "launch", "ranks"), [
    ({"servers": 1}, "fit", {}, (1, 2)),
    ({"servers": 2}, "fit", {"recovery": "auto"}, (2,)),
    ({"servers": 1, "server_ranks": "own"}, "fit", {}, (1,)),
    ({"servers": 1}, "fit", {"recovery": "restart"}, ()),
    ({"servers": 1}, "validate", {"recovery": "auto"}, ()),
    ({"servers": 1}, "fit", {"recovery": "auto", "max_restarts": 0}, ()),
    ({"stage": 3}, "fit", {"recovery": "auto"}, ()),
])  # fmt: skip
def test_workers_without_a_server_can_be_lost(strategy, verb, launch, ranks):
    assert rejoining(strategy, verb, **launch) == ([], ranks)


@pytest.mark.parametrize(("strategy", "launch", "said"), [
    ({"stage": 3}, {}, "strategy=parameter_server"),
    ({"servers": 3}, {}, "every rank holds a server"),
    ({"servers": 2, "server_ranks": "own"}, {}, "one worker is left"),
    ({"servers": 1}, {"max_restarts": 0}, "launch=resilient"),
    ({"servers": 1}, {"spares": 1}, "starts the lost rank anew"),
])  # fmt: skip
def test_what_cannot_be_rejoined(strategy: dict[str, Any], launch: dict[str, Any], said: str) -> None:
    [problem] = rejoining(strategy, **launch)[0]
    assert said in problem
