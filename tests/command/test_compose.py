"""Composing and checking a configuration, in one process and without torch where possible."""

import importlib
import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import fields
from datetime import datetime
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from tests.command.project import RECIPE, problems_of
from trainwright.command import run
from trainwright.command.help import description_of, field_comments, help_of_verb, overview
from trainwright.command.schema.compose import choices_of, compose, compose_checked, config_loader, group_names
from trainwright.command.sweep import expand
from trainwright.core.config.targets import lineage, problem_of_target
from trainwright.core.layout import Layout
from trainwright.core.problems import ConfigError
from trainwright.core.processes import machine
from trainwright.core.run import run_directory
from trainwright.core.run.launcher import Launcher
from trainwright.core.run.run_directory import default_run_dir, read_config, write_config
from trainwright.launch import schema as schema
from trainwright.launch.auto_options import AutoOptions, DeepSpeedJSONOptions
from trainwright.strategies.compose import world
from trainwright.strategies.contract.registry import all_options
from trainwright.trainer.loop.loss_scale import LossScaling

SCHEMAS = [
    schema.RunConfig,
    *(options for _, options in all_options()),
    AutoOptions,
    DeepSpeedJSONOptions,
    *(kind for kinds in schema.TYPES.values() for kind in kinds.values()),
    LossScaling,
]


GROUPS = {
    *("accumulation", "balance", "checkpoint", "compression", "monitor", "guard", "logger", "launch", "preemption"),
    *("trainer", "optimizer"),
}


def mine(conf: Path, *overrides: str) -> DictConfig:
    return compose("mine", overrides, config_dir=conf)


def problems(conf: Path, *overrides: str, verb: str = "fit", launcher: Launcher | None = None) -> list[str]:
    return problems_of("recipe=mine", *overrides, conf=conf, verb=verb, launcher=launcher)


# Groups that belong to a recipe.
RECIPE_WITH = {"adapter": "finetune", "objective": "finetune", "model": "hf_causal_lm"}


@pytest.mark.thorough
def test_all_choices_compose() -> None:
    loader = config_loader()
    choices = {group: choices_of(loader, group) for group in group_names(loader)}
    for recipe in choices.pop("recipe"):
        assert OmegaConf.get_type(compose(recipe, [])) is schema.RunConfig
    for group in choices.keys() & RECIPE_WITH.keys():
        for choice in choices.pop(group):
            assert OmegaConf.get_type(compose(RECIPE_WITH[group], [f"{group}={choice}"])) is schema.RunConfig
    # The n-th choices of all other groups at once: composing asks nobody whether they go together.
    for number in range(max(map(len, choices.values()))):
        chosen = {group: found[number % len(found)] for group, found in choices.items() if found}
        cfg = compose("gpt", [f"{group}={choice}" for group, choice in chosen.items()])
        assert OmegaConf.get_type(cfg) is schema.RunConfig, chosen


def test_all_choices_have_descriptions() -> None:
    loader = config_loader()
    for group in group_names(loader):
        for choice in choices_of(loader, group):
            assert len(description_of(loader, group, choice)) > 10, f"{group}/{choice}.yaml needs a first comment line"


def test_all_fields_have_help() -> None:
    for cls in SCHEMAS:
        silent = {item.name for item in fields(cls)} - field_comments(cls).keys() - {"_target_"} - GROUPS
        assert not silent, f"{cls.__name__}: {silent}"


def test_global_hydra_is_untouched(conf: Path) -> None:
    mine(conf)
    assert not GlobalHydra.instance().is_initialized()


def test_user_recipe(conf: Path) -> None:
    cfg = mine(conf, "strategy=zero3", "strategy.shard=2", "devices=2", "module.hidden=16", "+module.extra=1")
    assert cfg.strategy._target_ == "trainwright.strategies.data.zero.ZeroStrategy"
    assert (cfg.strategy.stage, cfg.strategy.shard, cfg.devices) == (3, 2, 2)
    assert (cfg.module.hidden, cfg.module.extra) == (16, 1)
    assert cfg.data.batch_size == cfg.micro_batch_size == 4
    assert problems(conf, "strategy=zero3", "devices=2") == []


def test_model_by_size() -> None:
    by_model, by_size = (compose("llama_3d", [word]) for word in ("model=350m", "size=350m"))
    assert by_model == by_size
    assert by_model != compose("llama_3d")


@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "bf16-true", "16-mixed"])
def test_precision_choices(conf: Path, precision: str) -> None:
    assert mine(conf, f"precision={precision}").precision == precision


@pytest.mark.sample(10)
@pytest.mark.parametrize(("overrides", "parts"), [
    (["strategy=zer3"], ["strategy=zer3", "did you mean zero3?", "zero1, zero2, zero3"]),
    (["recipe=gtp"], ["recipe=gtp", "did you mean gpt?", "digits", "mine"]),
    (["precision=fp8"], ["precision=fp8", "16-mixed, 32, bf16-mixed, bf16-true"]),
    (["size=llama"], ["llama is a choice of model, type model=llama", "sizes: 125m, 175b"]),
    (["max_stepz=4"], ["max_stepz=4", "did you mean max_steps?", "max_epochs", "`trainwright fit --help`"]),
    (["strategie=ddp"], ["strategie=ddp", "did you mean strategy?"]),
    (["strategy=zero3", "strategy.shrd=2"], ["strategy.shrd=2", "did you mean shard?", "keys of strategy: shard, "]),
    (["+strategy.bucket=2"], ["strategy.bucket", "'bucket'", "activation_checkpointing"]),
    (["+depth=2"], ["+depth=2", "module.", "data."]),
    (["module.hiden=2"], ["module.hiden=2", "did you mean hidden?", "+module.hiden=2"]),
    (["max_steps=many"], ["max_steps=many", "a whole number or null (off)", "max_steps=2"]),
    (["devices=1.5"], ["devices=1.5", "a whole number or text", "devices=2"]),
    (["trainer.detect_anomaly=maybe"], ["trainer.detect_anomaly=maybe", "true or false"]),
    (["size=nano"], ["size=nano", "'mine' has no group 'size'", "leave it out"]),
    (["max_steps"], ["max_steps", "not key=value", "max_steps=100"]),
    (["max_steps=[1,"], ["max_steps=[1,", "not key=value"]),
    (["max_steps=1,2"], ["max_steps=1,2", "-m (--multirun)"]),
    (["logger=null"], ["logger=null", "~logger", "csv, default"]),
    (["~max_steps"], ["~max_steps", "max_steps=null"]),
    (["hydra.run.dir=x"], ["hydra.run.dir=x", "type run_dir=x"]),
    (["optimizer=sgd"], ["optimizer=sgd", "has no effect", "optimizer: ${optimizer}"]),
    (["devices=0"], ["devices=0", "at least 1", "devices=1"]),
    (["devices=all"], ["devices=all", "auto"]),
    (["nodes=0"], ["nodes=0", "at least 1"]),
    (["max_steps=-1"], ["max_steps=-1", "null for no limit"]),
    (["accelerator=tpu"], ["accelerator=tpu", "auto, cpu, gpu"]),
    (["accelerator=gpu"], ["accelerator=gpu", "no GPU", "accelerator=cpu"]),
    (["devices=2"], ["strategy=single", "this run has 2", "devices=1", "strategy=ddp"]),
    (["strategy=zero3", "strategy.shard=3", "devices=4"], ["shard=3", "4 rank(s)", "1, 2, 4", "strategy.shard=-1"]),
    (["strategy=zero2", "strategy.shard=2", "devices=4"], ["shard=2", "4 rank(s)"]),
    (["global_batch_size=6"], ["global_batch_size=6", "4 or 8", "micro_batch_size="]),
    (["strategy=ddp", "devices=2", "global_batch_size=12"], ["global_batch_size=12", "8 or 16"]),
    (["global_batch_size=8", "accumulation=fixed", "accumulation.steps=2"], ["accumulation.steps=2", "leave one out"]),
    (["accumulation=fixed"], ["accumulation.steps", "type accumulation.steps=..."]),
    (["accumulation=fixed", "accumulation.steps=0"], ["accumulation.steps=0", "at least 1"]),
    (["strategy=zero2", "strategy.offload=parameters"], ["offload=parameters", "stage 2", "strategy=zero3"]),
    (["strategy=zero2", "strategy.offload=all"], ["strategy.offload=all", "none, optimizer, parameters"]),
    (["strategy.activation_checkpointing=some"], ["activation_checkpointing=some", "none, full, selective"]),
    (["strategy.activation_checkpointing=selective"], ["selective", "strategy.checkpoint_modules="]),
    (["strategy.checkpoint_modules=[net]"], ["checkpoint_modules", "activation_checkpointing=selective"]),
    (["trainer.gradient_clip_algorithm=max"], ["gradient_clip_algorithm=max", "norm, value"]),
    (["max_steps=null"], ["max_steps and max_epochs are both null", "max_epochs=10"]),
    (["ckpt_path=nowhere.ckpt"], ["ckpt_path=nowhere.ckpt", "no such file"]),
    (["ckpt_path=last"], ["ckpt_path=last", "runs/mine/", "resume=auto"]),
    (["ckpt_path=last", "run_dir=here"], ["ckpt_path=last", "here/checkpoints"]),
    (["ckpt_path=http://somewhere/a"], ["ckpt_path=http://somewhere/a", "can be read over http", "fetch the folder"]),
    (["launch=multinode", "launch.hosts=[a,b]", "nodes=2"], ["TRAINWRIGHT_RUN_TOKEN", "torchrun --nnodes=2"]),
    (["compression=randomk"], ["compression=randomk was removed", "type compression=topk"]),
    (["launch=kubernetes", "launch.image=a", "launch.claim=b", "launch.job=jobset"], ["every job is a TrainJob"]),
    (["launch=torchrun"], ["launch=torchrun", "torchrun --nproc-per-node", "launch=local"]),
    (["strategy=ddp", "nodes=2"], ["nodes=2", "torchrun --nnodes=2"]),
    (["launch.port=99999"], ["launch.port=99999", "65535"]),
    (["module._target_=my_module.MyModul"], ["my_module.MyModul", "did you mean my_module.MyModule?"]),
    (["balance=auto"], ["one data rank computes every sample", "balance=none"]),
    (["balance=fixed", "strategy=ddp", "devices=2"], ["balance.shares=[3,1]"]),
    (["preemption.signals=null"], ["not a list", "preemption.signals=[]"]),
    (["preemption.url_headers=Google"], ["not a dict", "preemption.url_headers.name=value"]),
    (["module._target_=no_such_module.A"], ["no_such_module.A", "there is no module 'no_such_module'"]),
    (["module._target_=Model"], ["Model", "package.module.ClassName"]),
    (["+callbacks.stop.patience=3"], ["callbacks.stop", "_target_"]),
    (["name=a/b"], ["name='a/b'", "directory"]),
    (["+checks=[nowhere.checks:data]"], ["nowhere.checks:data", "package.module:function"]),
    (["module.hidden=${hiden}"], ["hiden", "not found"]),
])  # fmt: skip
def test_error_messages(conf: Path, overrides: list[str], parts: list[str]) -> None:
    recipe = () if overrides[0].startswith("recipe=") else ("recipe=mine",)
    found = problems_of(*recipe, *overrides, conf=conf)
    assert len(found) == 1, found
    assert [part for part in parts if part not in found[0]] == []
    assert [part for part in ("Traceback", "hydra.cc", "Config search path") if part in found[0]] == []


@pytest.mark.parametrize(("lines", "said"), [
    ("  - override /launch: multinode\n", "launch=multinode was removed; start torchrun on each host"),
    ("  - override /launch: kubernetes\nlaunch: {job: jobset}\n", "launch.job was removed: every job is a TrainJob"),
])  # fmt: skip
def test_removed_options_in_recipes(conf: Path, lines: str, said: str) -> None:
    head = "# @package _global_\ndefaults:\n  - mine\n"
    (conf / "recipe/old.yaml").write_text(head + lines.replace("\nlaunch", "\n  - _self_\nlaunch"), encoding="utf-8")
    [problem] = compose_checked(["recipe=old"], conf).problems
    assert said in problem


def test_all_problems_are_reported_together(conf: Path) -> None:
    words = ("strategy=zer3", "strategy.shard=3", "devices=2", "max_stepz=-1", "global_batch_size=7")
    found = problems(conf, *words, "launch.port=0", "ckpt_path=nowhere", "module._target_=nowhere.A")
    text = "\n".join(found)
    # The misspelt strategy is checked as the one that was probably meant.
    for part in ("zer3", "max_stepz", "max_steps=-1", "shard=3", "launch.port=0", "nowhere", "nowhere.A"):
        assert part in text
    assert str(ConfigError(found)).startswith(f"nothing was started, because of {len(found)} problems:\n  1. ")


def test_problems_beside_missing_values(conf: Path) -> None:
    found = problems(conf, "accumulation=fixed", "devices=2", "ckpt_path=nowhere")
    assert len(found) == 3


def test_no_guess_without_a_similar_name(conf: Path) -> None:
    # Checked with the default strategy instead, devices=2 would look wrong as well.
    assert len(problems(conf, "strategy=quantum_annealing", "devices=2")) == 1


def test_missing_recipe() -> None:
    with pytest.raises(
        ConfigError, match="no recipe was given; type recipe=<name>, recipes: digits, diloco_gpt, finetune"
    ):
        compose(overrides=["devices=2"])


def test_more_devices_than_gpus(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_gpus", lambda: 1)
    [found] = problems(conf, "strategy=ddp", "devices=2")
    assert found == "devices=2 on a machine with one GPU; type devices=1, or accelerator=cpu"
    assert problems(conf, "strategy=ddp", "devices=2", "accelerator=cpu") == []
    monkeypatch.setattr(machine, "num_gpus", lambda: 4)
    [found] = problems(conf, "strategy=ddp", "devices=8", "accelerator=gpu")
    assert "machine with 4 GPUs; type devices=4" in found
    planned, _ = run.plan(mine(conf, "strategy=ddp", "devices=auto"), "fit")
    assert planned.devices == 4


def test_port_taken(conf: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        [found] = problems(conf, f"launch.port={port}")
        assert found.startswith(f"launch.port={port} is taken by another process on 127.0.0.1; leave launch.port out")
        assert machine.port_is_taken(port)
    assert problems(conf, f"launch.port={port}") == []


def test_run_dir_not_writable(conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    # A mode of 0555 does not stop root, whom CI often is.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked)
    [found] = problems(conf, f"run_dir={locked}/run")
    assert f"{locked} is not writable" in found
    assert "another run_dir=" in found
    (tmp_path / "file").write_text("")
    [found] = problems(conf, "run_dir=file/run")
    assert "is a file" in found


def test_full_disk(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    cfg = mine(conf)
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ConfigError, match="No space left on device; type another run_dir="):
        run.prepare(cfg, "fit")


def test_occupied_run_dir(conf: Path, tmp_path: Path) -> None:
    write_config(run.plan(mine(conf, "run_dir=here"), "fit")[0])
    [found] = problems(conf, "run_dir=here")
    assert "holds a run already" in found
    assert "ckpt_path=last" in found
    (tmp_path / "here/checkpoints").mkdir()
    (tmp_path / "here/checkpoints/a.ckpt").touch()
    assert problems(conf, "run_dir=here", "ckpt_path=last") == []
    assert problems(conf, "run_dir=here", verb="test") == []


def test_launcher_with_other_world_size(conf: Path) -> None:
    launcher = Launcher("torchrun", rank=0, world_size=4, local_world_size=2)
    [found] = problems(conf, "strategy=ddp", "devices=2", launcher=launcher)
    assert "devices=2 nodes=1 make 2 rank(s)" in found
    assert "started 4" in found
    assert "devices=auto" in found
    planned, found = run.plan(mine(conf, "strategy=ddp", "devices=auto"), "fit", launcher)
    assert found == []
    assert (planned.devices, planned.nodes) == (2, 2)


def test_recipe_checks(conf: Path, tmp_path: Path) -> None:
    (tmp_path / "my_checks.py").write_text(
        "def data(cfg, num_data_ranks):\n"
        "    return [f'hidden={cfg.module.hidden}: too few, {num_data_ranks} ranks wait']\n"
    )
    more = ("checks=[my_checks:data]", "module.hidden=3", "strategy=ddp", "devices=2")
    assert problems(conf, *more) == ["hidden=3: too few, 2 ranks wait"]
    assert len(problems(conf, *more, "launch.port=0")) == 2


def test_faulty_recipes(conf: Path) -> None:
    (conf / "recipe/typo.yaml").write_text(RECIPE + "max_stepz: 3\n")
    with pytest.raises(
        ConfigError, match=r"in recipe/typo.yaml: there is no key 'max_stepz'; did you mean max_steps\?"
    ):
        compose("typo", config_dir=conf)
    (conf / "recipe/broken.yaml").write_text("# @package _global_\nname: [\n")
    with pytest.raises(ConfigError, match="cannot be composed"):
        compose("broken", config_dir=conf)
    (conf / "recipe/other.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /strategy: zer3\nname: other\n"
    )
    with pytest.raises(ConfigError, match="zer3"):
        compose("other", config_dir=conf)
    (conf / "recipe/empty.yaml").write_text("# @package _global_\nname: empty\nmax_steps: 1\n")
    [found] = run.plan(compose("empty", config_dir=conf), "fit")[1]
    assert "module: names no class" in found


def test_missing_config_dir(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config-dir nowhere: there is no such folder"):
        compose("mine", config_dir="nowhere")


def test_shadowed_user_file(conf: Path) -> None:
    (conf / "recipe/gpt.yaml").write_text(RECIPE)
    with pytest.raises(
        ConfigError, match=r"recipe/gpt\.yaml: a file of trainwright has the same name, .* rename yours$"
    ):
        compose("gpt", config_dir=conf)


def test_a_folder_of_links_leaves_groups_of_the_same_name_out(conf: Path) -> None:
    for name, text in {
        "config.yaml": "defaults: [logger: csv]\n",  # the start of another program, and no choice
        "logger/csv.yaml": "csv: {}\n",
        "trainer/default.yaml": "_target_: lightning.pytorch.Trainer\n",
        "hydra/default.yaml": "run: {dir: logs}\n",
        "data/mine.yaml": "batch_size: 3\n",
    }.items():
        (conf / name).parent.mkdir(exist_ok=True)
        (conf / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        compose_checked(["recipe=mine"], conf)
    [problem] = refused.value.problems
    assert f"--config-dir {conf}: logger/csv.yaml, trainer/default.yaml: " in problem
    [(typed, given)] = re.findall(r": (mkdir .*), then --config-dir (.*)$", problem)
    subprocess.run(typed, shell=True, check=True)
    own = Path(given)
    assert sorted(path.name for path in own.iterdir()) == ["data", "recipe"]
    assert compose_checked(["recipe=mine", "+data=mine"], own).cfg.data.batch_size == 3  # type: ignore[union-attr]
    (own / "logger").symlink_to("../logger")  # a link hides no clash
    with pytest.raises(ConfigError, match="logger/csv.yaml: a file of trainwright"):
        compose_checked(["recipe=mine"], own)
    (conf / "logger/csv.yaml").rename(conf / "logger/mine.yaml")
    assert not compose_checked(["recipe=mine"], own).problems


def test_user_strategy_yaml(conf: Path) -> None:
    (conf / "strategy").mkdir()
    (conf / "strategy/mine.yaml").write_text("_target_: my_module.MyStrategy\nnodes_per_pod: 4\n")
    cfg = mine(conf, "strategy=mine", "strategy.nodes_per_pod=8")
    assert cfg.strategy.nodes_per_pod == 8


def test_derived_user_strategy(conf: Path, tmp_path: Path) -> None:
    (tmp_path / "my_strategies").mkdir()
    (tmp_path / "my_strategies/__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "my_strategies/base.py").write_text(
        "import trainwright as tw\nfrom torch import nn\nclass Base(Mixin, tw.DDPStrategy): ...\n"
    )
    (tmp_path / "my_strategies/own.py").write_text(
        "from .base import Base as Near\nclass Own(Near): ...\nclass Other: ...\n"
    )
    importlib.invalidate_caches()  # folders that change within a tick of the clock look unchanged
    assert "trainwright.strategies.data.ddp.DDPStrategy" in lineage("my_strategies.own.Own")
    assert list(lineage("my_strategies.own.Other")) == ["my_strategies.own.Other"]
    assert list(lineage("nowhere.Class")) == ["nowhere.Class"]
    replicas = ("launch=resilient", "launch.recovery=replicas", "devices=2")
    (conf / "strategy").mkdir()
    (conf / "strategy/own.yaml").write_text("_target_: my_strategies.own.Own\n")
    (conf / "strategy/other.yaml").write_text("_target_: my_strategies.own.Other\n")
    assert world.options_of(mine(conf, "strategy=own").strategy).layout() == Layout(replicate=-1)
    assert problems(conf, "strategy=own", *replicas) == []
    # Nobody knows whether there are replicas, so it must not be taken for a restart without a word.
    [found] = problems(conf, "strategy=other", *replicas)
    assert found.startswith("launch.recovery=replicas with my_strategies.own.Other: its configuration does not show")


def test_strategy_checks(conf: Path, tmp_path: Path) -> None:
    (tmp_path / "even.py").write_text(
        "def ranks(cfg, num_data_ranks):\n    return [f'{num_data_ranks} ranks'] if num_data_ranks % 2 else []\n"
    )
    (conf / "strategy").mkdir()
    typed = "defaults: [_ddp, _self_]\n_target_: trainwright.strategies.data.ddp.DDPStrategy\nchecks: [even:ranks]\n"
    (conf / "strategy/typed.yaml").write_text(typed)
    (conf / "strategy/plain.yaml").write_text(typed.replace("defaults: [_ddp, _self_]\n", ""))
    for name in ("typed", "plain"):
        assert problems(conf, f"strategy={name}", "devices=2") == []
        assert problems(conf, f"strategy={name}", "devices=3") == ["3 ranks"]


def test_targets_are_checked_without_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "loud"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "models.py").write_text("class Model:\n    pass\n")
    assert problem_of_target("module", "loud.models.Model") is None
    assert problem_of_target("module", "loud.models.Model.build") is None
    assert "did you mean loud.models.Model? it defines: loud.models.Model" in str(
        problem_of_target("module", "loud.models.Modle")
    )
    moved = problem_of_target("strategy", "trainwright.strategies.zero.ZeroStrategy")
    assert str(moved).endswith("type strategy._target_=trainwright.strategies.data.zero.ZeroStrategy")
    assert problem_of_target("optimizer", "torch.optim.AdamW") is None
    assert problem_of_target("module", "collections.OrderedDict") is None
    (package / "open.py").write_text("from os import *\n")
    assert problem_of_target("module", "loud.open.anything") is None


def test_targets_in_deleted_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks import the present files, not what this process has loaded."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    monkeypatch.syspath_prepend(str(second))
    monkeypatch.syspath_prepend(str(first))
    (first / "moved_module.py").write_text("class Old: ...\n", encoding="utf-8")
    try:
        importlib.import_module("moved_module")
        assert problem_of_target("module", "moved_module.Old") is None
        (first / "moved_module.py").unlink()
        assert "there is no module 'moved_module'" in str(problem_of_target("module", "moved_module.Old"))
        (second / "moved_module.py").write_text("class New: ...\n", encoding="utf-8")
        importlib.invalidate_caches()
        assert problem_of_target("module", "moved_module.New") is None
        assert "moved_module has no 'Old'" in str(problem_of_target("module", "moved_module.Old"))
    finally:
        sys.modules.pop("moved_module", None)


def test_run_directory_keeps_old_files(conf: Path, tmp_path: Path) -> None:
    cfg, found = run.plan(mine(conf, "run_dir=here"), "fit")
    assert found == []
    assert write_config(cfg) == Path("here/config.yaml")
    assert read_config("here").data.batch_size == 4
    Path("here/metrics.csv").write_text("step,loss\n")
    cfg.max_steps = 99
    write_config(cfg)
    assert Path("here/metrics.1.csv").read_text() == "step,loss\n"
    assert OmegaConf.load("here/config.1.yaml").max_steps == 4  # type: ignore[union-attr]
    assert read_config("here").max_steps == 99
    assert not list(Path("here").glob("*.partial"))


def test_default_run_dirs_are_unique() -> None:
    first = default_run_dir("mine")
    first.mkdir(parents=True)
    assert default_run_dir("mine", None).parent == first.parent
    now = datetime(2026, 1, 31, 14, 5, 9)
    default_run_dir("mine", now).mkdir()
    assert default_run_dir("mine", now) == Path("runs/mine/2026-01-31_14-05-09-1")


def test_concurrent_runs_get_separate_directories(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "timestamp", lambda now=None: "2026-01-31_14-05-09")
    # What each of them sees before the others have made theirs.
    monkeypatch.setattr(run, "default_run_dir", lambda name: Path("runs/mine/free"))
    found = [run.prepare(mine(conf), "fit").run_dir for _ in range(3)]
    assert found == [f"runs/mine/2026-01-31_14-05-09{number}" for number in ("", "-1", "-2")]
    assert all(read_config(each).run_dir == each for each in found)


def test_ckpt_path_last(conf: Path) -> None:
    folder = Path("runs/mine/2026-01-01/checkpoints")
    folder.mkdir(parents=True)
    (folder / "a.ckpt").touch()
    planned, found = run.plan(mine(conf, "ckpt_path=last"), "fit")
    assert found == []
    assert planned.ckpt_path == "runs/mine/2026-01-01/checkpoints/a.ckpt"
    assert planned.run_dir != "runs/mine/2026-01-01"


def test_sweep_expansion(conf: Path) -> None:
    jobs = expand(["recipe=mine", "strategy=ddp,zero3", "seed=range(0,2)"], conf)
    assert [job.directory_name for job in jobs] == [
        "0_strategy=ddp,seed=0",
        "1_strategy=ddp,seed=1",
        "2_strategy=zero3,seed=0",
        "3_strategy=zero3,seed=1",
    ]
    assert [job.overrides[0] for job in jobs] == ["recipe=mine"] * 4
    [one] = expand(["recipe=mine"], conf)
    assert one.directory_name == "0"
    assert len(expand(["recipe=mine", "strategy=glob(zero*)"], conf)) == 3
    [odd] = expand(["recipe=mine", "+module.path=a/../b"], conf)[:1]
    assert "/" not in odd.directory_name


def test_help_text(conf: Path) -> None:
    text = help_of_verb("fit", conf)
    loader = config_loader(conf)
    for group in group_names(loader):
        assert f"\n  {group}\n" in text
        for choice in choices_of(loader, group):
            assert f" {choice} " in text
    for key in ("devices", "nodes", "accelerator", "seed", "max_steps", "max_epochs", "global_batch_size", "run_dir"):
        assert f"\n  {key} (" in text
    assert "A recipe of my own." in text
    assert "  * single" in text
    assert "_zero" not in text
    assert "hydra" not in text.lower()
    assert max(len(line) for line in text.splitlines()) <= 110
    for verb in ("fit", "validate", "test", "predict"):
        assert f"\n  {verb} " in overview()
        assert help_of_verb(verb).startswith(f"trainwright {verb}: ")


@pytest.mark.parametrize(("typed", "value"), [
    ("+module.text=/tmp/ü", "/tmp/ü"),
    ("+module.text=it's", "it's"),
    ("+module.text=a=b c", "a=b c"),
    ("+module.text=f(x)&y", "f(x)&y"),
    ("+module.text=[ü,1,it's,~]", ["ü", 1, "it's", "~"]),
    ("+module.text='a,b'", "a,b"),
    ("+module.text=1e-3", 1e-3),
])  # fmt: skip
def test_values_that_need_quotes(conf: Path, typed: str, value: object) -> None:
    assert mine(conf, typed).module.text == value
    jobs = expand([typed, "seed=1,2"])
    assert [mine(conf, *job.overrides).module.text for job in jobs] == [value, value]


@pytest.mark.parametrize(("typed", "answer"), [
    ("+module.text=a,b", """'+module.text="a,b"'"""),
    ("+module.text=f(1,2)", """'+module.text="f(1,2)"'"""),
    ("+module.text='a", "'+module.text=\"'\"'\"'a\"'"),
])  # fmt: skip
def test_answer_with_quotes(conf: Path, typed: str, answer: str) -> None:
    [said] = compose_checked(["recipe=mine", typed], conf).problems
    assert said.startswith(typed)
    assert said.endswith(f"; for a text with these signs type {answer}")
    [word] = shlex.split(answer)
    assert mine(conf, word).module.text == typed.partition("=")[2]


@pytest.mark.parametrize("text", ["on: 3\n", "device: {no: 3}\n", "callbacks: {mine: {_target_: a.B, on: 3}}\n"])
def test_boolean_keys(conf: Path, text: str) -> None:
    (conf / "recipe/on.yaml").write_text(RECIPE + text)
    said = compose_checked(["recipe=on"], conf).problems
    assert len(said) == 1
    assert "YAML reads the keys on, off, yes and no as true and false" in said[0]
    (conf / "recipe/on.yaml").write_text(RECIPE.replace("  sleep:", "  on: 3\n  sleep:"))
    assert "write such a key in quotes: 'on':" in compose_checked(["recipe=on"], conf).problems[0]
