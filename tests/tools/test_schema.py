"""`trainwright schema` prints a JSON Schema that allows what a recipe may say, and nothing else."""

import json
import math
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from jsonschema import Draft202012Validator
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import trainwright.conf
from tests.command.project import run_command
from trainwright.command.help import description_of
from trainwright.command.schema.compose import choices_of, config_loader, group_names
from trainwright.core.config.options import field_problems, json_schema, number, word
from trainwright.launch.schema import RunConfig
from trainwright.tools.schema import recipe_schema

RECIPES = sorted((Path(trainwright.conf.__path__[0]) / "recipe").glob("*.yaml"))


@cache
def validator() -> Draft202012Validator:
    schema = recipe_schema(config_loader())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def allows(recipe: str) -> bool:
    return validator().is_valid(yaml.safe_load(recipe))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_own_recipes_are_valid(path: Path) -> None:
    assert [error.message for error in validator().iter_errors(yaml.safe_load(path.read_text()))] == []


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("max_steps: 3", "max_step: 3"),
        ("max_steps: 3", "max_steps: -3"),
        ("max_steps: ${trainer.min_steps}", "max_steps: three"),
        ("max_steps: ???", "max_steps: ??"),
        ("devices: auto", "devices: all"),
        ("devices: 4096", "devices: 4097"),
        ("precision: bf16-mixed", "precision: bf16"),
        ("strategy: {shard: 2, tensor: 2}", "strategy: {shards: 2}"),
        ("strategy: {activation_checkpointing: full}", "strategy: {activation_checkpointing: fully}"),
        ("strategy: {plan: {any: thing}}", "strategy: zero3"),
        ("launch: {max_restarts: 3}", "launch: {max_restarts: -1}"),
        ("balance: {shares: [3, 1]}", "balance: {shares: [3, 0]}"),
        ("balance: {smoothing: 0.9}", "balance: {smoothing: 1.0}"),
        ("trainer: {loss_scale: {initial: 8}}", "trainer: {loss_scale: {first: 8}}"),
        ("trainer: {loss_weighting: tokens}", "trainer: {loss_weighting: token}"),
        ("checks: [a.b:c]", "checks: a.b:c"),
        ("module: {_target_: a.B, any: thing}", "module: a.B"),
        ("callbacks: {mine: {_target_: a.B}}", "callbacks: [a.B]"),
        ("defaults: [_self_]", "defaults: _self_"),
        ("defaults: [gpt]", "defaults: [gpd]"),
        ("defaults: [override /strategy: zero3]", "defaults: [override /strategy: zero4]"),
        ("defaults: [/size: 7b]", "defaults: [/sizes: 7b]"),
        ("defaults: [/optimizer@module.second: sgd]", "defaults: [overide /optimizer: sgd]"),
        ("defaults: [override /logger: null]", "defaults: [null]"),
    ],
)
def test_faults_are_found(good: str, bad: str) -> None:
    assert allows(good)
    assert not allows(bad)


def test_every_key_and_choice_is_there() -> None:
    schema, loader = validator().schema, config_loader()
    assert set(schema["properties"]) == {"defaults", *(item.name for item in fields(RunConfig))}
    for group in group_names(loader):
        named = {each["const"]: each["description"] for each in schema["$defs"][group]["anyOf"] if "const" in each}
        assert named == {name: description_of(loader, group, name) for name in choices_of(loader, group)}
    steps = schema["properties"]["max_steps"]
    assert steps["description"].startswith("Optimizer steps to train")
    assert steps["default"] is None
    assert "default" not in schema["properties"]["name"]


# ---- the schema and the checks of a run agree -----------------------------------------------------------------------

# No 1.0, which is a whole number in JSON.
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 8, 5000, 10**10, 2**40, 2**70, -0.5, 0.5, 1.5, math.inf, "", " ", "auto", "no such",
    "none", "full", [], [1], [1, 2], [-1.5], ["a"], {}, {"a": 1}, {"a": -1}, {"a": "b"},
)  # fmt: skip


def types() -> Iterator[type]:
    yield RunConfig
    for stored in ConfigStore.instance().repo.values():
        for node in stored.values() if isinstance(stored, dict) else ():
            found = OmegaConf.get_type(node.node) if hasattr(node, "node") else None
            if is_dataclass(found) and found.__module__.startswith("trainwright."):
                yield found


def checked(cfg: DictConfig, item: Field[Any], hint: Any, value: Any) -> bool | None:
    """Whether a run takes a value; None: it reads the value as one of another type."""
    try:
        cfg[item.name] = value
    except (OmegaConfBaseException, ValueError):
        return False
    node: Any = cfg._get_node(item.name)
    read = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node._value()
    return not list(field_problems(item, hint, item.name, value)) if repr(read) == repr(value) else None


def test_schema_agrees_with_the_checks_of_a_run() -> None:
    config_loader()
    compared, done = 0, set()
    reference = {"$defs": {"reference": validator().schema["$defs"]["reference"]}}
    for schema in types():
        hints, cfg = get_type_hints(schema), OmegaConf.structured(schema)
        for item in fields(schema):
            hint = hints[item.name]
            if is_dataclass(hint) or hint in (Any, dict[int, Any]) or id(item) in done:  # keys of JSON are text
                continue
            done.add(id(item))
            found = Draft202012Validator({**json_schema(item, hint), **reference})
            for value in VALUES:
                expected = checked(cfg, item, hint, value)
                if expected is None or (not expected and "allows" in item.metadata):
                    continue
                compared += 1
                assert found.is_valid(value) == expected, (schema.__name__, item.name, value, found.schema)
    assert compared > 3000


@pytest.mark.parametrize(
    ("item", "hint", "good", "bad"),
    [
        (number(1, least=2, most=4), int, (2, 4), (1, 5, 2.5, True, None)),
        (number(1.0, above=0, below=1), float, (0.5, 1e-9), (0, 1)),
        (number(1, least=-math.inf), int, (-7,), (2**63,)),
        (number(None, "auto", null="for off"), Any, (None, "auto", 1.5), ("no", -1)),
        (number(None, above=0), dict[str, float] | None, (None, {"a": 1}), ({"a": 0}, 1)),
        (word("a", "a", "b"), list[str], (["a", "b"], []), (["c"], "a")),
    ],
)
def test_schema_of_a_field(item: Any, hint: Any, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    item.name = "key"
    found = Draft202012Validator({**json_schema(item, hint), "$defs": {"reference": {"const": "${a}"}}})
    assert all(map(found.is_valid, (*good, "${a}")))
    assert not any(map(found.is_valid, bad))


# ---- the command ----------------------------------------------------------------------------------------------------


def test_command_prints_the_schema(tmp_path: Path) -> None:
    (tmp_path / "my_conf" / "recipe").mkdir(parents=True)
    (tmp_path / "my_conf" / "strategy").mkdir()
    recipe = "# @package _global_\n# yaml-language-server: $schema=../../recipe.schema.json\n# What it trains.\n"
    (tmp_path / "my_conf" / "recipe" / "mine.yaml").write_text(recipe + "defaults: [gpt]\n")
    (tmp_path / "my_conf" / "strategy" / "fast.yaml").write_text("defaults: [zero3]\n")
    alone, both = run_command("schema", cwd=tmp_path), run_command("schema", "--config-dir", "my_conf", cwd=tmp_path)
    assert (alone.returncode, both.returncode) == (0, 0)
    mine = yaml.safe_load("defaults: [mine, override /strategy: fast]")
    assert not Draft202012Validator(json.loads(alone.stdout)).is_valid(mine)
    found = json.loads(both.stdout)
    assert Draft202012Validator(found).is_valid(mine)
    assert {"const": "mine", "description": "What it trains."} in found["$defs"]["recipe"]["anyOf"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("schema", "--help"), 0, "usage: trainwright schema"),
        (("schema", "--config-dir", "nowhere"), 2, "--config-dir nowhere: there is no such folder"),
        (("fit", "--help", "--config-dir", "nowhere"), 2, "--config-dir nowhere: there is no such folder"),
        (("schema", "--jsn"), 2, "unrecognized arguments: --jsn"),
        (("-m", "schema"), 2, "schema comes first: type trainwright schema"),
    ],
)
def test_command_line(words: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == code
    assert said in done.stdout
