"""Arguments that a module, its sizes or its data cannot have."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from trainwright.recipes.gpt.model import GPTConfig
from trainwright.recipes.gpt.sample_text import SampleText
from trainwright.recipes.hugging_face.causal_lm import HuggingFaceModule
from trainwright.recipes.moe.model import MoEConfig
from trainwright.recipes.tables.wide_deep import ClickData, WideDeep
from trainwright.recipes.vision.digits import DigitsModule


@pytest.mark.parametrize(("make", "given", "said"), [
    (GPTConfig, {"layers": 0}, "Impossible GPT sizes: layers=0 (allowed: 1 or more)"),
    (GPTConfig, {"dim": 100, "heads": 3}, "dim=100 with heads=3 (allowed: dim a multiple of 2 x heads)"),
    (GPTConfig, {"dim": 12, "heads": 4}, "dim=12 with heads=4"),
    (GPTConfig, {"heads": 4, "kv_heads": 3}, "kv_heads=3 with heads=4 (allowed: a divisor of heads)"),
    (MoEConfig, {"experts": 2, "experts_per_token": 3}, "experts=2 with experts_per_token=3"),
    (MoEConfig, {"experts": 0}, "Impossible mixture of experts: experts=0"),
    (MoEConfig, {"balance": -1.0}, "balance=-1.0 (allowed: 0, which is off, or more)"),
    (MoEConfig, {"layers": 0}, "layers=0 (allowed: 1 or more)"),
    (SampleText, {"length": -1}, "Impossible sample: length=-1"),
    (SampleText, {"temperature": -1}, "temperature=-1"),
    (SampleText, {"prompt": ""}, "prompt=''"),
    (HuggingFaceModule, {}, "pretrained=None"),
    (HuggingFaceModule, {"config": {"model_type": "llama"}, "pretrained": "x"}, "pretrained=x"),
    (HuggingFaceModule, {"config": {"hidden_size": 8}}, "pretrained=None"),
    (HuggingFaceModule, {"loss_chunk": -1}, "Type module.loss_chunk=512"),
    (DigitsModule, {"channels": 10}, "module.channels=10 (allowed: a multiple of 4)"),
    (WideDeep, {"crosses": [["site", "unknown"]]}, "module.crosses has ['site', 'unknown']"),
    (ClickData, {"samples": 3}, "data.samples=3 "),
])  # fmt: skip
def test_refused(make: Callable[..., Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make(**given)
