"""Communication advice of whole runs: measurements, output, and unchanged results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.faulty import fit, weights
from tests.callbacks.modules import Paper
from tests.parity.layout_modules import make_module
from trainwright.callbacks.traffic.communication_advice import FILE, CommunicationAdvice
from trainwright.strategies.contract.registry import make_strategy


def advised(strategy: str, options: dict[str, Any], steps: int) -> dict[str, Any]:
    advice = CommunicationAdvice(after_steps=3, console=(printed := Paper(width=80)))
    trainer = fit(strategy, options, advice, steps=steps, default_root_dir=".")
    plain = fit(strategy, {k: v for k, v in options.items() if k != "communication"}, steps=steps)
    return {
        "told": advice.advice is not None,
        "printed": printed.text.splitlines(),
        "written": Path(FILE).exists() and json.loads(Path(FILE).read_text()),
        "hooked": torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect"),
        "same": all(torch.equal(p, weights(plain)[name]) for name, p in weights(trainer).items()),
        "ahead": getattr(trainer.strategy, "_prefetch", None),
        "buckets": getattr(trainer.strategy, "_ddp_kwargs", {}).get("bucket_cap_mb"),
    }


def test_ddp_gets_advice_and_buckets(ranks):
    first, other = ranks(advised, 2, "ddp", {"communication": "auto", "average_by": "all_reduce"}, 7)
    gradients = 4 * sum(p.numel() for p in make_module("gpt").parameters() if p.requires_grad)
    written = first["written"]
    assert first["told"]
    assert other["told"]
    assert not first["hooked"], "hooks are removed"
    assert first["same"], "two ranks add two numbers in either order"
    assert first["buckets"] == other["buckets"] > 0
    assert f"buckets of {first['buckets']:.3g} MiB" in written["changed"]
    assert [link["axis"] for link in written["links"]] == ["replicate"]
    assert written["links"][0]["bandwidth"] > 0
    assert written["step"]["compute"] > 0
    assert written["step"]["gradient_bytes"] == gradients
    sent = {(axis, kind): bytes for axis, kind, _, bytes in written["step"]["sent"]}
    assert sent["replicate", "all_reduce"] == gradients
    names = [option["name"] for option in written["options"]]
    assert names[:5] == ["dense", "bf16", "int8", "powersgd", "topk"]
    assert written["options"][1]["sent"] == pytest.approx(gradients / 2, rel=0.01)
    assert first["printed"] == written["lines"]
    assert len(written["lines"]) == 3
    assert not other["printed"]


def test_sharded_replicas_in_a_short_run(ranks):
    first = ranks(advised, 4, "zero2", {"communication": "advise", "replicate": 2, "shard": 2}, 4)[0]
    written = first["written"]
    assert [link["axis"] for link in written["links"]] == ["replicate", "shard"]
    assert first["same"]
    assert written["changed"] == ""
    assert 0 < written["step"]["gradient_bytes"] < 4 * sum(p.numel() for p in make_module("gpt").parameters())


def test_stage_3_prefetch(ranks):
    first, other = ranks(advised, 2, "zero3", {"communication": "auto"}, 8)
    assert first["same"], "how far ahead changes no number"
    assert first["ahead"] == other["ahead"] >= 1
    assert f"gathers {first['ahead']} block(s) ahead" in first["written"]["changed"]


def test_invalid_values_and_strategies():
    with pytest.raises(ValueError, match="did you mean advise"):
        make_strategy("ddp", communication="advice")
    with pytest.raises(ValueError, match="with local updates"):
        make_strategy("local_sgd", communication="auto")
