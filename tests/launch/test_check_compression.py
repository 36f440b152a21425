"""Compression that is refused when the configuration is composed, and the group's options as the strategy gets them."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from trainwright.command.schema.compose import compose
from trainwright.core.layout import Layout
from trainwright.launch.checks.check_compression import compression_of, compression_refusals
from trainwright.strategies.averaging.compression.options import compressor_names, option_defaults
from trainwright.strategies.compose.world import options_of
from trainwright.strategies.data.ddp_options import DDPOptions
from trainwright.strategies.parameter_server.options import ParameterServerOptions

DDP = "trainwright.strategies.data.ddp.DDPStrategy"
ZERO = "trainwright.strategies.data.zero.ZeroStrategy"


def refusals(
    compression: dict[str, Any],
    layout: Layout | None = Layout(replicate=2),  # noqa: B008
    target: str = DDP,
    optimizer: str = "AdamW",
    precision: str = "32",
) -> list[str]:
    cfg: Any = {
        "compression": compression,
        "strategy": {"_target_": target},
        "optimizer": {"_target_": f"torch.optim.{optimizer}"},
        "precision": precision,
    }
    return compression_refusals(OmegaConf.create(cfg), options_of(cfg["strategy"]), layout)


def test_possible() -> None:
    assert refusals({"name": "none"}, Layout(), "other.Strategy") == []
    for name in compressor_names():
        assert refusals({"name": name}) == []
    assert refusals({"name": "topk"}, precision="16-mixed", optimizer="SGD") == []
    assert refusals({"name": "powersgd", "sends": "steps"}) == []
    assert refusals({"name": "topk"}, Layout(replicate=2, shard=2), ZERO) == []
    assert refusals({"name": "topk"}, None) == []


@pytest.mark.parametrize(("arguments", "words"), [
    (({"name": "topp"},), "Did you mean 'topk'?"),
    (({"name": "topk", "ratio": 2.0},), "compression.ratio=2.0 for topk: must be above 0 and at most 1"),
    (({"name": "topk"}, Layout(shard=4), ZERO), "type strategy.replicate=2 (or more)"),
    (({"name": "bf16"}, Layout(), DDP), "compression=bf16 with replicate=1"),
    (({"name": "bf16"}, Layout(), "other.Strategy"), "only the strategies of this project, and those"),
    (({"name": "onebit"}, Layout(replicate=2), DDP, "SGD"), "type optimizer=adamw, or compression=topk"),
    (({"name": "onebit"}, Layout(replicate=2), DDP, "AdamW", "16-mixed"), "type precision=bf16-mixed"),
    (({"name": "topk", "sends": "steps"}, Layout(replicate=2), DDP, "SGD"), "or compression.sends=auto"),
    (({"name": "topk", "sends": "steps", "warmup_steps": 0},), "Adam has no variance before a warm-up"),
])  # fmt: skip
def test_impossible(arguments: Any, words: str) -> None:
    [problem] = refusals(*arguments)
    assert words in problem


def test_a_warm_up_is_of_gradients_that_are_averaged() -> None:
    """The group's default is not handed to a strategy that has none; one that was typed is, which refuses it."""
    cfg = OmegaConf.create({"compression": {"name": "topk", **option_defaults("topk")}})
    assert compression_of(cfg, DDPOptions())["warmup_steps"] == 100
    assert compression_of(cfg, ParameterServerOptions()).keys() == {"name", "ratio", "values"}
    typed = {"name": "topk", "warmup_steps": 7}
    assert compression_of(OmegaConf.create({"compression": typed}), ParameterServerOptions()) == typed
    [problem] = ParameterServerOptions(compression=typed).problems()
    assert "compressed from the first one on" in problem


@pytest.mark.parametrize("name", compressor_names())
def test_the_group_gives_every_option_with_its_default(name: str) -> None:
    cfg = compose("digits", [f"compression={name}"])
    assert OmegaConf.to_container(cfg.compression) == {"name": name, **option_defaults(name)}
