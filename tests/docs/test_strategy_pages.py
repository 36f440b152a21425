"""Each strategy has a page, with all of its keys, and formulas that agree with what the code counts."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.core.config_store import ConfigStore

from tests.docs.blocks import ROOT
from tests.parity.layout_modules import LENGTH, make_module
from tests.planning.bytes_of_ranks import Predictor, predictor
from trainwright.core.device_profiles import profile_named
from trainwright.core.layout import Layout
from trainwright.launch.schema import register_schema
from trainwright.planning.layout_report import StateRules, bytes_of_ranks
from trainwright.planning.memory.share import share_of
from trainwright.planning.memory.state import StateTable
from trainwright.planning.model.experts import probability_sent
from trainwright.planning.search.work import Work
from trainwright.planning.time.cost import ModelCut
from trainwright.planning.time.step import bubble_of, step_time
from trainwright.strategies.compose.engine_options import EngineOptions
from trainwright.strategies.compose.model_plan import plan_for
from trainwright.strategies.contract.registry import strategy_names
from trainwright.strategies.plan.model_plan import ModelPlan
from trainwright.strategies.plan.tensor_rules import plan_splits

DOCS, YAMLS = ROOT / "docs", ROOT / "conf" / "strategy"
PAGES = DOCS / "strategies"
SECTIONS = ("When", "What it costs", "What it needs of the model", "What is refused", "Keys")
# A yaml that presets another strategy's keys is described on that strategy's page.
READY = {"hybrid_3d": "hybrid"}
RANKS, MICRO_BATCHES = 4, 3


def choices() -> list[str]:
    """Return the values of `strategy=` and `Trainer(strategy=...)`."""
    return sorted({*strategy_names(), *(file.stem for file in YAMLS.glob("*.yaml"))} - READY.keys())


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


@pytest.mark.parametrize("name", choices())
def test_each_strategy_has_a_page(name):
    text = page(name)
    assert text.startswith(f"# {name}: ")
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [title for title in titles if title in SECTIONS] == list(SECTIONS)
    assert "```text\n" in text, "the picture of its layout"
    assert f"strategy={name}" in text
    assert f"](strategies/{name}.md)" in (DOCS / "strategies.md").read_text(), "choosing leads to it"


@pytest.mark.parametrize(("name", "where"), READY.items())
def test_a_preset_is_named_on_the_page_of_its_keys(name, where):
    assert (YAMLS / f"{name}.yaml").exists()
    assert f"`strategy={name}`" in page(where)


# The keys of auto are those of its choice, described with the planner.
@pytest.mark.parametrize("name", [name for name in choices() if name != "auto"])
def test_a_page_names_all_keys(name):
    assert not keys_of_configuration(name) - keys_of_page(PAGES / f"{name}.md", frozenset())


def keys_of_configuration(name: str) -> set[str]:
    """Of the typed configuration behind a yaml."""
    base = next(each for each in yaml.safe_load((YAMLS / f"{name}.yaml").read_text())["defaults"] if each != "_self_")
    register_schema()
    node = ConfigStore.instance().load(f"strategy/{base}.yaml").node
    return {key for key in node if key != "_target_"}


def keys_of_page(file: Path, seen: frozenset[Path]) -> set[str]:
    """Words under "Keys", and those of the sections that these link to."""
    if file in seen:
        return set()
    if file == DOCS / "strategies.md":
        return set(keys_of_configuration("single"))
    text = file.read_text().partition("\n## Keys\n")[2]
    keys = {word.partition(".")[0] for word in re.findall(r"`([a-z_.]+)`", text)}
    for link in re.findall(r"\]\(([\w./]+\.md)#(?:keys|for-every-strategy)\)", text):
        keys |= keys_of_page((file.parent / link).resolve(), seen | {file})
    return keys


# ---- formulas -----------------------------------------------------------------------------------------------------


def value_of(formula: str, **values: float) -> float:
    """A formula as the pages write it, where names beside each other are multiplied.

    >>> value_of("4 P (m + 1) / N", P=10, m=1, N=2)
    40.0
    """
    spaced = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    return float(eval(spaced, {"__builtins__": {}}, values))


def formula_of(name: str, row: str) -> str:
    """The formula in a row of the table of costs on a page."""
    found = re.search(rf"^\| {re.escape(row)} \| `([^`]+)`", page(name), re.MULTILINE)
    assert found is not None, f"{name}.md has no row {row!r} with a formula"
    return found[1]


def test_formulas_are_read_as_they_are_written():
    assert value_of("4 P (m + 1) (N - 1) / N", P=10, m=3, N=4) == 120
    assert value_of("16 Pw + 16 Ps / N", Pw=1, Ps=8, N=4) == 48
    with pytest.raises(NameError):
        value_of("16 Q", P=1)


LAYOUTS = {
    "single": (Layout(), 0),
    "ddp": (Layout(replicate=RANKS), 0),
    "zero1": (Layout(shard=RANKS), 1),
    "zero2": (Layout(shard=RANKS), 2),
    "zero3": (Layout(shard=RANKS), 3),
    "tensor": (Layout(tensor=RANKS), 3),
    "pipeline": (Layout(pipeline=RANKS), 3),
    "context": (Layout(context=RANKS), 3),
    "expert": (Layout(shard=RANKS, expert=RANKS), 3),
    "local_sgd": (Layout(replicate=RANKS), 3),
    "diloco": (Layout(replicate=RANKS), 3),
}


def network_of(name: str) -> str:
    return "mixtral" if name == "expert" else "gpt-untied"


@cache
def module_of(network: str) -> Any:
    with torch.device("meta"):
        return make_module(network, "adamw")


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [*LAYOUTS, "parameter_server"])
def test_held_bytes_are_those_of_the_formula(name):
    module = module_of(network_of(name))
    layout, stage = LAYOUTS.get(name, (Layout(replicate=RANKS), 0))
    servers = 2 if name == "parameter_server" else 0
    held = bytes_of_ranks(module, layout, EngineOptions(), StateRules(stage=stage, servers=servers))
    total = sum(parameter.numel() for parameter in module.parameters())
    split = sum(module.get_parameter(n).numel() for n in plan_splits(module, tensor_plan(module)))
    values = {"P": total, "N": RANKS, "S": servers, "Ps": split, "Pw": total - split}
    if name == "pipeline":
        values["Ps"] = held[0].parameters / 4
    worker = value_of(formula_of(name, "held per rank"), **values)
    # Adam counts its steps in a number for each tensor; rows that do not divide are filled up.
    assert held[-1 if servers else 0].total == pytest.approx(worker, rel=0.03)
    if servers:
        server = value_of(formula_of(name, "besides, where a server is"), **values)
        assert held[0].total == pytest.approx(worker + server, rel=0.03)
    if name == "zero3":
        assert all(each.total == pytest.approx(worker, rel=0.03) for each in held)


def tensor_plan(module: Any) -> ModelPlan:
    return plan_for(module, Layout(tensor=2), EngineOptions())  # of a Mixtral with two key heads, too


def predicted_of(name: str) -> tuple[Predictor, Work]:
    """The planner's arithmetic for a strategy, and the step that it is asked for."""
    layout, stage = LAYOUTS[name]
    parts = 4 * RANKS if name == "pipeline" else 1
    rounds = 1 if name == "pipeline" else MICRO_BATCHES
    found = predictor(network_of(name), LENGTH)
    return found, Work(layout, stage, micro_batch=2, rounds=rounds, parts=parts)


def traffic_of(name: str, axis: str) -> float:
    """Bytes that the planner says a rank sends along an axis in a step."""
    found, work = predicted_of(name)
    layout = work.layout
    table = StateTable(
        found.facts, lambda tensor: plan_for(found.module, Layout(tensor=tensor), EngineOptions()), found.module
    )
    kinds = found.facts.kinds
    per_rank = len(kinds) // layout.pipeline
    spans = [range(i * per_rank, (i + 1) * per_rank) for i in range(layout.pipeline)]
    # One in the middle of a pipeline sends in both directions.
    share = share_of(kinds, spans, layout.pipeline, work.schedule, min(1, layout.pipeline - 1))
    cost = found.facts.of(ModelCut(layout.tensor, layout.context, expert=layout.expert))
    sent = step_time(table, cost, work, (share,), profile_named("h100"), "32").traffic
    return sent[axis].bytes


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "pipeline"])
def test_sent_bytes_are_those_of_the_formula(name):
    module = module_of(network_of(name))
    total = sum(parameter.numel() for parameter in module.parameters())
    inside = sum(p.numel() for n, p in module.named_parameters() if ".blocks." in n)
    values = {"P": total, "O": total - inside, "N": RANKS, "m": MICRO_BATCHES}
    if name == "pipeline":
        values = {"A": 2 * (LENGTH - 1) * 32, "m": 4 * RANKS, "v": 1}
    axis = {"ddp": "replicate", "pipeline": "pipeline"}.get(name, "shard")
    expected = value_of(formula_of(name, "sent per step"), **values)
    assert traffic_of(name, axis) == pytest.approx(expected, rel=0.02)


# Positions that blocks see are one less than the tokens, and two for each of the context ranks and halves.
LONG = 2 * RANKS + 1
TRAVELS = probability_sent(4, 2, RANKS)
# Bytes of one of queries, keys and values of a rank's part of a sequence: 2 positions of 32 numbers.
PART = 2 * 32 * 4


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "row", "method", "length", "values"),
    [
        ("tensor", "sent per step", "ring", LENGTH, {"A": (LENGTH - 1) * 32}),
        ("context", "sent per step, `attention=ring`", "ring", LONG, {"K": 2 * PART, "Q": PART}),
        ("context", "sent per step, `attention=gather`", "gather", LONG, {"K": 2 * PART, "Q": PART}),
        ("context", "sent per step, `attention=ulysses`", "ulysses", LONG, {"K": 2 * PART, "Q": PART}),
        ("expert", "sent per step", "ring", LENGTH, {"n": LENGTH, "D": 32, "k": 2, "q": TRAVELS}),
    ],
)  # fmt: skip
def test_a_block_sends_what_the_formula_says(name, row, method, length, values):
    """The axes along which blocks send; one block, one sample."""
    layout, _ = LAYOUTS[name]
    facts = predictor(network_of(name), length).facts
    cost = facts.of(ModelCut(layout.tensor, layout.context, attention=method, expert=layout.expert))
    sent = cost.blocks[0].sent.items()
    # Of the expert axis, the rows that travel; a few integers carry their number.
    counted = sum(
        each.least for (axis, kind), each in sent if axis == name and (name, kind) != ("expert", "all_gather")
    )
    expected = value_of(formula_of(name, row), B=1, L=1, m=1, N=RANKS, **values)
    assert counted == pytest.approx(expected, rel=0.02)


def test_bubbles_are_those_of_the_page():
    text = page("pipeline")
    formula = re.search(r"\| waiting per step \| `([^`]+)` seconds", text)
    assert formula is not None
    for schedule, per_rank in (("1f1b", 1), ("interleaved_1f1b", 2)):
        expected = value_of(formula[1], N=RANKS, f=0.2, b=0.4, v=per_rank)
        assert bubble_of(schedule, RANKS, per_rank, 0.2, 0.4) == pytest.approx(expected)
    for schedules, rows in (("interleaved_zero_bubble", "2 or more"), ("zbv", "2, in a V")):
        line = next(each for each in text.splitlines() if f"`{schedules}`" in each and rows in each)
        zero = re.search(r"about `([^`]+)`", line)
        assert zero is not None
        expected = value_of(zero[1], N=RANKS, f=0.2, b=0.4, v=2)
        assert bubble_of(schedules, RANKS, 2, 0.2, 0.4) == pytest.approx(expected)


def test_tokens_travel_with_the_probability_of_the_page():
    text = page("expert")
    assert "q = 1 - C(E - E / N, k) / C(E, k)" in text
    expected = 1 - math.comb(8 - 8 // RANKS, 2) / math.comb(8, 2)
    assert probability_sent(8, 2, RANKS) == pytest.approx(expected)
