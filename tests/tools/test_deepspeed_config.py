"""Translation of a DeepSpeed JSON to native configuration, with a report on every key."""

import csv
import inspect
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from tests.command.project import environment
from tests.warm import warm_run
from trainwright.command.cli import main
from trainwright.command.schema.compose import Composition, compose_checked
from trainwright.core.config.override_words import typed
from trainwright.core.processes import machine
from trainwright.launch.checks import validate
from trainwright.strategies.compose.world import Surroundings
from trainwright.tools.deepspeed.expand import not_expanded, translate
from trainwright.tools.deepspeed.reading import ParsedFile, read
from trainwright.tools.deepspeed.recipe import Recipe, recipe_of
from trainwright.tools.deepspeed.report import Line, Report
from trainwright.tools.deepspeed.table import KEYS, SWITCHED, TREE, Tree
from trainwright.tools.deepspeed.themes.optimizer import OWN, TORCH

SCHEDULES = "trainwright.callbacks.schedule.schedules"
ROOT = Path(__file__).parents[2]
FILES = sorted((Path(__file__).parent / "deepspeed_configs").glob("*.json"))
DOCUMENTED = (Path(__file__).parent / "deepspeed_configs" / "documented_keys.txt").read_text().split()


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)


GPT = Recipe(
    name="gpt", world_size=2, micro_batch_size=4, global_batch_size=32, max_steps=500, warmup_steps=20,
    optimizer={
        "_target_": "torch.optim.AdamW", "_partial_": True, "lr": 0.004, "betas": [0.9, 0.95], "weight_decay": 0.1,
    },
    own_optimizer_keys=frozenset({"_target_", "_partial_", "lr", "weight_decay"}), gradient_clip_val=1.0,
)  # fmt: skip


def composed(path: Path | str, *overrides: str) -> Composition:
    """Compose gpt with a file on two ranks, unless overrides say otherwise."""
    given = {text.split("=")[0] for text in overrides}
    rest = [text for text in ("recipe=gpt", "devices=2") if text.split("=")[0] not in given]
    return compose_checked([*rest, "strategy=deepspeed_json", f"strategy.path={path}", *overrides])


def cfg_of(composition: Composition) -> DictConfig:
    """Return a configuration without problems."""
    assert composition.problems == []
    assert composition.cfg is not None
    return composition.cfg


def translated(
    content: dict[str, Any] | Path, *overrides: str, recipe: Recipe | None = GPT
) -> tuple[dict[str, Any], Report]:
    """Translate without composing: native keys with their values, what was typed included, and the report."""
    path = content if isinstance(content, Path) else Path("ds_config.json")
    if isinstance(content, dict):
        path.write_text(json.dumps(content))
    report, problems = translate(read(path), recipe, overrides)
    assert not problems, problems
    parsed = [OverridesParser.create().parse_override(text) for text in [*report.overrides, *overrides]]
    return {each.get_key_element().lstrip("+"): each.value() for each in parsed}, report


def line_of(report: Report, key: str) -> Line:
    [line] = [line for line in report.lines if line.key == key]
    return line


def leaves(tree: dict[str, Any], known: Tree = TREE, above: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in tree.items():
        inside = isinstance(value, dict) and value and (known.get(name) or f"{above}{name}" not in KEYS)
        found |= leaves(value, known.get(name, {}), f"{above}{name}.") if inside else {f"{above}{name}"}
    return found


def test_documented_keys_are_not_taken_for_misspellings() -> None:
    assert len(DOCUMENTED) > 400
    for path in DOCUMENTED:
        assert not any("is not a key" in problem for problem in with_key(path, 1).problems), path


def test_documentation_has_every_key_with_an_effect() -> None:
    found: dict[str, str] = {}
    for row in (ROOT / "docs" / "deepspeed.md").read_text().split("## All keys")[1].splitlines():
        if row.startswith("| `"):
            names, status, becomes, note = (cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1])
            section = ""
            for name in re.findall("`([^`]+)`", names):
                path = section + name if name.startswith(".") else name
                section = path.rpartition(".")[0]
                assert path not in found, path
                assert becomes or note, path
                found[path] = "unsupported" if status == "stops a run" else status
    assert found == {path: key.status for path, key in KEYS.items()}


def with_key(path: str, value: Any) -> ParsedFile:
    """Read a file with one key, whose section is switched on."""
    section, *rest = path.split(".")
    tree: dict[str, Any] = {section: {} if rest else value}
    if section in SWITCHED:
        tree[section]["enabled"] = True
    node = tree[section]
    for part in rest[:-1]:
        node = node.setdefault(part, {})
    if rest:
        node[rest[-1]] = value
    Path("one.json").write_text(json.dumps(tree))
    return read("one.json")


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.status == "unsupported"])
def test_keys_that_stop_a_run(path: str) -> None:
    key = KEYS[path]
    stopping: Any = {"bool": not key.harmless, "text": "sum" if key.words else "fixed", "mapping": {"a": 1}}[key.kind]
    report, _ = translate(with_key(path, stopping), GPT)
    [line] = report.stopping
    assert (line.key, line.value, line.note) == (path, stopping, key.note)
    report, _ = translate(with_key(path, key.harmless), GPT)
    assert report.stopping == []
    assert report.no_effect == (path,)


@pytest.mark.parametrize("path", ["aio.block_size", "comet.api_key", "autotuning.enabled", "pipeline.seed_layers"])
def test_other_keys_are_listed_without_values(path: str) -> None:
    report, problems = translate(with_key(path, "do-not-show-me"), GPT)
    assert not problems
    assert report.no_effect == (path,)
    assert f"no effect here (off, the default, or not supported): {path}\n" in report.to_text()
    assert "do-not-show-me" not in report.to_text() + json.dumps(report.to_dict())


@pytest.mark.sample(2)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_reports_are_complete(file: Path) -> None:
    result = composed(file, f"recipe={'moe' if file.stem == 'moe' else 'gpt'}")
    report = result.import_report
    assert report is not None
    assert sorted([*(line.key for line in report.lines), *report.no_effect]) == sorted(
        leaves(json.loads(file.read_text()))
    )
    assert {text for line in report.lines for text in line.becomes} <= set(report.overrides)
    if file.stem == "methods":
        assert {line.key.split(".")[0] for line in report.stopping} == {
            *("optimizer", "sparse_attention", "curriculum_learning", "elasticity", "compression_training")
        }
        assert len(result.problems) == len(report.stopping)
        return
    assert validate.validate(_in(cfg_of(result)), Surroundings()) == []


def _in(cfg: DictConfig) -> DictConfig:
    cfg.run_dir = "run"
    return cfg


def test_recipe() -> None:
    cfg = cfg_of(compose_checked(["recipe=gpt", "devices=2"]))
    assert recipe_of(cfg, compose_checked(["recipe=gpt", "optimizer=adagrad"]).cfg) == GPT


def test_equals_the_explicit_configuration() -> None:
    cfg = cfg_of(composed(FILES[0].with_name("zero2_offload_cpu.json")))
    explicit = compose_checked([
        "recipe=gpt", "devices=2", "strategy=zero2", "strategy.offload=optimizer", "strategy.bucket_mib=762.939",
        "precision=32", "micro_batch_size=4", "global_batch_size=null", "accumulation=fixed", "accumulation.steps=2",
        "optimizer.lr=3e-5", "optimizer.betas=[0.8,0.999]", "+optimizer.eps=1e-8", "optimizer.weight_decay=3e-7",
        "trainer.gradient_clip_algorithm=norm", "trainer.log_every_n_steps=2000",
        "+callbacks.learning_rate_schedule="
        "{_target_:trainwright.callbacks.schedule.learning_rate_schedule.LearningRateSchedule,"
        f"schedule:{{_target_:{SCHEDULES}.Warmup,warmup_steps:500,lowest:0,highest:3e-5}}}}",
    ])  # fmt: skip
    cfg.deepspeed_json = None
    assert OmegaConf.to_container(cfg, resolve=True) == OmegaConf.to_container(cfg_of(explicit), resolve=True)


ZERO, RATE = "zero_optimization", "callbacks.learning_rate_schedule.schedule"
OFFLOADED = {"stage": 2, "cpu_offload": True, "ignore_unused_parameters": True}
HALF = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
ADAM = {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "_target_": "torch.optim.AdamW"}
TENSOR = {"tensor": 2, "loss_parallel": True, "stage": 1, "shard": 1, "replicate": -1}


def under(section: str, **values: Any) -> dict[str, Any]:
    return {f"{section}.{key}": value for key, value in values.items()}


@pytest.mark.parametrize(("content", "expected"), [
    ({ZERO: {"stage": 0}}, {"strategy": "ddp"}),
    ({}, {"strategy": "ddp"}),
    ({ZERO: True}, {"strategy": "zero1"}),
    ({ZERO: OFFLOADED}, {"strategy": "zero2", **under("strategy", offload="optimizer", find_unused_parameters=True)}),
    ({ZERO: {"stage": 3, "offload_param": {"device": "nvme"}}},
     {"strategy": "zero3", "strategy.offload": "parameters"}),
    ({ZERO: {"stage": 3, "mics_shard_size": 2}}, under("strategy", shard=2, replicate=-1)),
    ({"bf16": {"enabled": True}}, {"precision": "bf16-mixed"}),
    ({"bfloat16": {"enabled": True}}, {"precision": "bf16-mixed"}),
    ({"fp16": {"enabled": False}}, {"precision": "32"}),
    ({"bf16": HALF}, {"precision": "bf16-true"}),
    ({"fp16": {"enabled": True, "loss_scale": 128, "min_loss_scale": 4}},
     {"precision": "16-mixed", **under("trainer.loss_scale", initial=128.0, fixed=True)}),
    ({"fp16": {"enabled": True, "initial_scale_power": 8, "min_loss_scale": 2}},
     under("trainer.loss_scale", initial=256.0, least=2.0, growth_interval=1000)),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, {"precision": "16-mixed"}),
    ({"amp": {"enabled": True, "opt_level": "O0"}}, {"precision": "32"}),
    ({"gradient_clipping": 0}, {"trainer.gradient_clip_val": None}),
    ({"communication_data_type": "fp16"}, {"compression": "fp16"}),
    ({"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}},
     {"strategy": "hybrid", **under("strategy", **TENSOR)}),
    ({"sequence_parallel_size": 2, ZERO: {"stage": 3}},
     {"strategy": "hybrid", **under("strategy", context=2, attention="ulysses", stage=3)}),
    ({"expert_parallel": {"enabled": False, "autoep_size": 2}}, {"strategy": "ddp"}),
    ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, under("strategy", expert=2, stage=1)),
    ({"pipeline": {"stages": "auto"}}, {"strategy": "ddp"}),
    ({"optimizer": {"type": "Adam"}}, {"optimizer": "adamw", **under("optimizer", **ADAM)}),
    ({"optimizer": {"type": "adam", "params": {"adam_w_mode": False}}}, {"optimizer._target_": "torch.optim.Adam"}),
    ({"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9}}},
     {"optimizer": "sgd", **under("optimizer", _target_="torch.optim.RMSprop", alpha=0.9)}),
    ({"optimizer": {"type": "OneBitAdam"}},
     {"optimizer": "adamw", "compression": "onebit", "compression.warmup_steps": 100000}),
    ({"checkpoint": {"writer": {"decoupled": True}}}, {"checkpoint": "async"}),
    ({"steps_per_print": 7}, {"trainer.log_every_n_steps": 7}),
    ({"comms_logger": {"enabled": True}}, {"monitor": "communication"}),
    ({"compile": {"deepcompile": True}}, {"strategy.compile": True}),
    ({"pipeline": {"activation_checkpoint_interval": 2}}, {"strategy.activation_checkpointing": "full"}),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": [1, 2]}}},
     under(RATE, _target_=f"{SCHEDULES}.OneCycle", lowest=0.1, highest=[1, 2])),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}}, under(RATE, highest=0.001)),
], ids=lambda value: json.dumps(value)[:50])  # fmt: skip
def test_translation(content: dict[str, Any], expected: dict[str, Any]) -> None:
    native, report = translated(content)
    assert {line.key for line in report.lines} | set(report.no_effect) == leaves(content)
    assert {key: native.get(key, "missing") for key in expected} == expected
    assert ("strategy.offload" in native) == ("offload" in json.dumps(content))


def test_batch_sizes_of_a_pipeline() -> None:
    content = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "pipeline": {"stages": 2}}
    native, _ = translated(content, recipe=replace(GPT, world_size=4))
    layout = under("strategy", micro_batches=6, pipeline=2, shard=1, replicate=-1)
    assert native.items() >= {"micro_batch_size": 12, "global_batch_size": 24, **layout}.items()


@pytest.mark.parametrize(("train", "micro", "accumulation", "expected"), [
    (16, 2, 4, {"global_batch_size": 16, "micro_batch_size": 2}),
    (16, None, 4, {"global_batch_size": 16, "micro_batch_size": 2}),
    (16, 2, None, {"global_batch_size": 16, "micro_batch_size": 2}),
    (16, None, None, {"global_batch_size": 16, "micro_batch_size": 8}),
    (16, "auto", "auto", {"global_batch_size": 16}),
    (16, "auto", 4, {"global_batch_size": 16, "micro_batch_size": 2}),
    (None, 2, 4, {"micro_batch_size": 2, "accumulation.steps": 4, "global_batch_size": None}),
    (None, 2, None, {"micro_batch_size": 2, "accumulation.steps": 1, "global_batch_size": None}),
    ("auto", 2, None, {"micro_batch_size": 2}),
    ("auto", "auto", "auto", {}),
    ("auto", "auto", 2, {"accumulation.steps": 2, "global_batch_size": None}),
    (None, None, None, {}),
])  # fmt: skip
def test_batch_sizes(train: Any, micro: Any, accumulation: Any, expected: dict[str, Any]) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = zip(names, (train, micro, accumulation), strict=True)
    native, _ = translated({name: size for name, size in given if size is not None})
    keys = ("global_batch_size", "micro_batch_size", "accumulation.steps")
    assert {key: native[key] for key in keys if key in native} == expected
    assert native.get("accumulation") == ("fixed" if "accumulation.steps" in expected else None)


def test_auto_is_taken_from_the_recipe_and_the_command_line() -> None:
    file = FILES[0].with_name("hugging_face_auto.json")
    result = composed(file, "precision=bf16-mixed", "optimizer.lr=0.01", "max_steps=70")
    cfg = cfg_of(result)
    schedule = cfg.callbacks.learning_rate_schedule.schedule
    assert (schedule.total_steps, schedule.warmup_steps, schedule.highest) == (70, 20, 0.01)
    assert cfg.optimizer == {**GPT.optimizer, "lr": 0.01, "eps": 1e-8}
    assert cfg.precision == "bf16-mixed"
    assert result.import_report is not None
    assert line_of(result.import_report, "fp16.enabled").status == "mapped"
    assert cfg.trainer.loss_scale.growth_interval == 2000
    with pytest.raises(AssertionError, match=r"total_num_steps is .auto., but the recipe .*gpt.* does not define it"):
        translated(file, recipe=replace(GPT, max_steps=None))


def test_command_line_overrides_the_file() -> None:
    content = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True},
        "optimizer": {"type": "Lamb", "params": {"lr": 0.1}}, "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 3,
    }  # fmt: skip
    typed = ("precision=32", "optimizer=sgd", "strategy.offload=none", "global_batch_size=12")
    native, report = translated(content, *typed)
    assert (native["precision"], native["strategy.offload"], native["global_batch_size"]) == (32, "none", 12)
    assert (native["micro_batch_size"], native["optimizer"]) == (3, "sgd")
    assert line_of(report, "bf16.enabled").overridden_by == ("precision=32",)
    assert line_of(report, "optimizer.type").overridden_by == ("optimizer=sgd",)
    assert line_of(report, "train_batch_size").overridden_by == ("global_batch_size=12",)
    assert report.stopping == []
    assert "on the command line: strategy.offload=none" in report.to_text()
    assert not any(text.startswith(("precision", "strategy.offload", "global", "optim")) for text in report.overrides)


def test_typed_axes_make_the_layout_hybrid() -> None:
    native, _ = translated({"zero_optimization": {"stage": 1}}, "strategy.tensor=2")
    assert (native["strategy"], native["strategy.tensor"], native["strategy.stage"]) == ("hybrid", 2, 1)


def test_modules_with_their_own_optimizer_keep_it() -> None:
    content = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "train_batch_size": 8}
    native, report = translated(content, recipe=replace(GPT, takes_optimizer=False))
    assert not any(key.startswith("optimizer") for key in native)
    lines = [line_of(report, key) for key in ("optimizer.type", "optimizer.params.lr")]
    assert [(line.status, line.becomes, line.stops_a_run) for line in lines] == [("unsupported", (), False)] * 2
    assert "configures its own optimizer" in line_of(report, "optimizer.type").note


def test_arguments_of_the_recipes_optimizer_are_removed() -> None:
    Path("a.json").write_text('{"optimizer": {"type": "AdamW"}}')
    cfg = cfg_of(composed("a.json", "recipe=linear_regression"))
    assert set(cfg.optimizer) == {"_target_", "_partial_", "lr", "betas", "eps", "weight_decay"}


def test_unsupported_combinations() -> None:
    scaled = {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 9}}, "fp16": {"enabled": True}}
    native, report = translated(scaled)
    assert "compression" not in native
    assert "precision=bf16-mixed" in line_of(report, "optimizer.params.freeze_step").note
    assert translated(scaled, "precision=bf16-mixed")[0]["compression.warmup_steps"] == 9
    native, _ = translated({"communication_data_type": "bf16", "zero_optimization": {"stage": 2}})
    assert native["strategy.reduce_dtype"] == "bf16"
    assert "compression" not in native
    _, report = translated({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})
    assert line_of(report, "zero_optimization.offload_param.device").status == "unsupported"
    assert translated({"communication_data_type": "bf16"}, recipe=replace(GPT, world_size=1))[0].keys() == {"strategy"}


@pytest.mark.parametrize(("text", "parts"), [
    ('{"zero_optimisation": {}}', ["zero_optimisation is not a key", "did you mean zero_optimization?"]),
    ('{"zero_optimization": {"stge": 1}}', ["zero_optimization.stge", "did you mean stage?"]),
    ('{"stage": 1}', ["did you mean zero_optimization.stage?"]),
    ('{"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}', ["did you mean device?"]),
    ('{"optimizer": {"type": "Adam", "params": {"betta": 1}}}', ["did you mean betas?"]),
    ('{"optimizer": {"type": "SGD", "params": {"betas": [1, 2]}}}', ["SGD has no such argument", "momentum"]),
    ('{"optimizer": {"type": "Adamm"}}', ["did you mean Adam"]),
    ('{"scheduler": {"type": "WarmupL"}}', ["did you mean WarmupLR?"]),
    ('{"scheduler": {"type": "WarmupDecayLR"}}', ["scheduler.params.total_num_steps"]),
    ('{"train_batch_size": "32"}', ["a whole number, without quotes"]),
    ('{"fp16": {"enabled": "true"}}', ["true or false, without quotes"]),
    ('{"fp16": true}', ["fp16 is true, but must be a section"]),
    ('{"train_batch_size": 1.5}', ["1.5", "a whole number"]),
    ('{"zero_optimization": {"stage": 4}}', ["zero_optimization.stage is 4", "0, 1, 2, 3"]),
    ('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', ["fp16.enabled and bf16.enabled"]),
    ('{"zero_optimization": {"stage": "auto"}}', ['"auto", which is not supported']),
    ('{"gradient_clipping": -1}', ["at least 0"]),
    ('{"train_batch_size": 0}', ["at least 1"]),
    ('{"tensor_parallel": {"autotp_size": 3}}', ["does not divide the 2 rank(s)", "devices="]),
    ('{"fp16": {}, "fp16": {}}', ["'fp16' is given twice"]),
    ('{"fp16": {}, // a comment\n}', ["is not JSON", "comments"]),
    ('{"gradient_clipping": NaN}', ["is not JSON", "NaN"]),
    ('{"gradient_clipping": 1e999}', ["gradient_clipping", "a number"]),
    ("[1]", ["a list, not a mapping"]),
    (
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}',
        ["32", "4 (train_micro_batch_size_per_gpu) x 2 (gradient_accumulation_steps) x 2", "16", "4 data ranks"],
    ),
    ('{"train_batch_size": 33, "train_micro_batch_size_per_gpu": 4}', ["33", "a multiple of 8"]),
])  # fmt: skip
def test_refused(text: str, parts: list[str]) -> None:
    Path("wrong.json").write_text(text)
    _, problems = translate(read("wrong.json"), GPT)
    assert len(problems) == 1, problems
    for part in ["wrong.json", *parts]:
        assert part in problems[0], problems[0]


def test_all_problems_are_reported() -> None:
    Path("wrong.json").write_text(
        '{"zero_optimization": {"stge": 1}, "fp16": {"enabled": 1}, "train_batch_size": 33, "gradient_clipping": -2, '
        '"gradient_allreduce_op": "sum"}'
    )
    problems = composed("wrong.json", "max_stepps=3").problems
    parts = ("stge", "fp16.enabled", "train_batch_size is 33", "gradient_clipping is -2", "never summed", "max_step")
    for part in parts:
        assert any(part in problem for problem in problems), part


def test_only_the_file_is_read() -> None:
    Path("wrong.json").write_text('{"tensorboard": {"enabled": true, "job_name": "${oc.env:HOME}"}}')
    [problem] = read("wrong.json").problems
    assert "an interpolation" in problem
    for path in ("none.json", "."):
        [problem] = read(path).problems
        assert "cannot be read" in problem


def test_missing_path() -> None:
    cfg = cfg_of(compose_checked(["recipe=gpt", "strategy=deepspeed_json"]))
    assert any("strategy.path has no value" in problem for problem in validate.validate(_in(cfg), Surroundings()))
    with pytest.raises(ValueError, match=r"strategy\.path=<ds_config\.json>"):
        not_expanded(path=None)


def test_import_writes_an_equal_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    file = FILES[0].with_name("zero1.json")
    typed = ["recipe=gpt", "devices=2", "module.warmup_steps=3", "precision=bf16-mixed"]
    assert main(["import-deepspeed", str(file), *typed, "--out", "conf/recipe/mine.yaml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["counts"] == {"mapped": 18, "approximated": 1, "unsupported": 0, "without effect": 6}
    cfg = cfg_of(composed(file, *typed))
    cfg.deepspeed_json, cfg.name = None, "mine"
    assert OmegaConf.to_container(cfg_of(compose_checked(["recipe=mine"], "conf"))) == OmegaConf.to_container(cfg)


def test_import_without_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    content = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "sparse_attention": {"mode": "fixed"}}
    Path("a.json").write_text(json.dumps(content))
    words = ["import-deepspeed", "a.json", "--out", "conf/recipe/ds.yaml"]
    assert main(words) == 0
    assert "sparse_attention.mode" in capsys.readouterr().out
    mine = "# @package _global_\n# Mine.\ndefaults:\n  - gpt\n  - ds\n  - _self_\nname: mine\n"
    Path("conf/recipe/mine.yaml").write_text(mine)
    cfg = cfg_of(compose_checked(["recipe=mine"], "conf"))
    assert (cfg.global_batch_size, cfg.micro_batch_size) == (32, 4)
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    content = {"train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    Path("auto.json").write_text(json.dumps(content))
    assert main(["import-deepspeed", "auto.json"]) == 2
    err = capsys.readouterr().err
    assert "2 problems" in err
    assert "recipe=<name>" in err


@pytest.mark.parametrize(("words", "part"), [
    ([], "usage: trainwright import-deepspeed"),
    (["--help"], "usage: trainwright import-deepspeed"),
    (["recipe=gpt"], "no file was given"),
    (["a.json", "b.json"], "one file at a time"),
    (["a.json", "--jsn"], "did you mean --json?"),
    (["a.json", "--out", "conf.json"], "cannot be read"),
])  # fmt: skip
def test_verb_is_refused(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-deepspeed", *words]) == (0 if words == ["--help"] else 2)
    captured = capsys.readouterr()
    assert part in captured.out + captured.err


@pytest.mark.parametrize(("name", "known"), [*OWN.items(), *TORCH.items()], ids=lambda value: str(value)[:12])
def test_optimizer_arguments(name: str, known: Any) -> None:
    for key in known.allowed:
        assert f"optimizer.params.{key}" in KEYS, key
    cls = getattr(torch.optim, known.name)
    parameters = inspect.signature(cls.__init__).parameters
    assert {*known.defaults, *known.more} <= set(parameters)
    # All arguments of the group's choice are overridden.
    choice = OmegaConf.load(ROOT / "conf" / "optimizer" / f"{known.group}.yaml")
    assert {str(key) for key in choice} - {"_target_", "_partial_"} <= set(known.defaults)
    if name in TORCH:
        defaults = {key: parameters[key].default for key in known.defaults}
        assert {key: list(d) if isinstance(d, tuple) else d for key, d in defaults.items()} == known.defaults


@pytest.mark.parametrize(
    "value", [None, True, 3, 1e-8, [0.9, 0.95], "plain", "a b", "it's", "a\\", "${x}", "null", {"a": "b'c"}]
)
def test_typed_values_are_parsed_back(value: Any) -> None:
    assert OverridesParser.create().parse_override(f"a={typed(value)}").value() == value


def test_fit_with_a_file() -> None:
    file = FILES[0].with_name("fp16_warmup.json")
    words = [
        "fit", "recipe=digits", "accelerator=cpu", "max_steps=2", "logger=csv", "checkpoint=none", "module.channels=4",
        "trainer.log_every_n_steps=1", "trainer.limit_val_batches=0", "run_dir=run",
        "strategy=deepspeed_json", f"strategy.path={file}",
    ]  # fmt: skip
    done = warm_run([sys.executable, "-m", "trainwright", *words], capture_output=True, env=environment(), timeout=200)
    assert done.returncode == 0, done.stderr
    assert "prescale_gradients, fp16.hysteresis" in done.stdout
    with Path("run", "metrics.csv").open() as rows:
        assert len([row for row in csv.DictReader(rows) if row["train_loss"]]) == 2
    cfg = OmegaConf.load("run/config.yaml")
    assert cfg.strategy._target_ == "trainwright.strategies.data.ddp.DDPStrategy"
    assert cfg.trainer.loss_scale.initial == 32768.0
    assert json.loads(Path("run/deepspeed_import.json").read_text())["counts"]["mapped"] > 10
