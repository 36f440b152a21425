"""Choosing and checking the checkpoint to resume, in the launching process and without torch."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from tests.command.project import environment, run_command
from tests.tools.checkpoints import RANK_FILE, cut_short, flip_bit, write_checkpoint
from trainwright.checkpoint.foreign.state_file import write_file
from trainwright.checkpoint.store import write_errors
from trainwright.checkpoint.write.save import Content
from trainwright.command import run
from trainwright.command.schema.compose import compose
from trainwright.command.verbs import run_command as main
from trainwright.core.problems import ConfigError
from trainwright.launch import schema as config
from trainwright.launch.recovery import check_resume
from trainwright.trainer.data import partition

RUN = "runs/mine/2026-01-01/checkpoints"


def planned(conf: Path, *overrides: str, verb: str = "fit") -> tuple[DictConfig, list[str]]:
    return run.plan(compose("mine", overrides, config_dir=conf), verb)


def decided(conf: Path, *overrides: str, verb: str = "fit") -> str | None:
    """Return the checkpoint to resume from; there must be no problems."""
    cfg, problems = planned(conf, *overrides, verb=verb)
    assert problems == []
    return None if cfg.ckpt_path is None else os.path.relpath(cfg.ckpt_path)


def refusal(conf: Path, *overrides: str, verb: str = "fit") -> str:
    """Return the only problem."""
    [problem] = planned(conf, *overrides, verb=verb)[1]
    return problem


@pytest.mark.sample(1)
@pytest.mark.parametrize("word", ["ckpt_path=last", "resume=auto"])
def test_newest_good_checkpoint(conf: Path, word: str) -> None:
    for step in (1, 2, 10, 3):
        write_checkpoint(f"{RUN}/step={step}", step)
    (Path(RUN) / ".step=11.partial-x").mkdir()
    assert decided(conf, word) == f"{RUN}/step=10"
    cut_short(f"{RUN}/step=10")
    flip_bit(f"{RUN}/step=3", "manifest.json", at=9)
    assert decided(conf, word) == f"{RUN}/step=2"
    assert decided(conf, word, "run_dir=runs/mine/2026-01-01") == f"{RUN}/step=2"
    write_checkpoint("runs/mine/2026-01-02/checkpoints/step=1", 1)
    assert decided(conf, word) == "runs/mine/2026-01-02/checkpoints/step=1"
    cut_short("runs/mine/2026-01-02/checkpoints/step=1")
    cfg, _ = planned(conf, word)
    assert os.path.relpath(cfg.ckpt_path) == f"{RUN}/step=2"
    assert list(cfg.resume_folders) == ["runs/mine/2026-01-02/checkpoints", RUN]


def test_weights_cannot_be_resumed(conf: Path) -> None:
    write_checkpoint(f"{RUN}/step=1", 1)
    weights = write_checkpoint(f"{RUN}/step=2", 2, kind="weights")
    assert decided(conf, "ckpt_path=last") == f"{RUN}/step=1"
    assert decided(conf, "ckpt_path=last", verb="test") == f"{RUN}/step=2"
    problem = refusal(conf, f"ckpt_path={weights}")
    assert "contains only weights" in problem
    assert f"type init_from={weights}" in problem
    assert decided(conf, f"init_from={weights}") is None


def test_weights_of_an_evaluation(conf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Never initial weights without a word: the best or newest checkpoint of the newest run."""
    problem = refusal(conf, verb="test")
    assert problem.startswith("test without a checkpoint: no run of mine under runs/mine/ has a checkpoint; type")
    assert all(word in problem for word in ("ckpt_path=<path>", "init_from=<weights>", "ckpt_path=initial"))
    assert decided(conf, "ckpt_path=initial", verb="predict") is None
    assert "ckpt_path=initial with fit" in refusal(conf, "ckpt_path=initial")
    assert "type ckpt_path=last" not in refusal(conf, "ckpt_path=last", verb="test")

    for step, loss in ((1, 0.5), (2, 0.3), (3, 0.4)):
        write_checkpoint(f"{RUN}/step={step}", step, monitor="val_loss", mode="min", metrics={"val_loss": loss})
    for given in ((), ("ckpt_path=best",), ("run_dir=results",), ("run_dir=results", "ckpt_path=best")):
        assert decided(conf, *given, verb="validate") == f"{RUN}/step=2"
    assert decided(conf, "ckpt_path=best") == f"{RUN}/step=2"
    assert decided(conf, "run_dir=results", "ckpt_path=last", verb="test") == f"{RUN}/step=3"
    cut_short(f"{RUN}/step=2")
    assert decided(conf, verb="test") == f"{RUN}/step=3"

    newer = write_checkpoint("runs/mine/2026-01-02/checkpoints/step=1", 1)
    assert decided(conf, verb="test") == newer  # which monitored nothing
    assert decided(conf, "ckpt_path=best", verb="test") == f"{RUN}/step=3"
    weights = write_checkpoint("weights", 1)
    monkeypatch.setattr("trainwright.command.verbs.launch", lambda cfg, *_: run.RunResult(Path("there")))
    for word, shown in (
        ("ckpt_path=initial", "the initial ones"),
        (f"init_from={weights}", weights),
        ("seed=1", newer),
    ):
        assert main(["test", "--config-dir", str(conf), "recipe=mine", word]) == 0
        assert f"weights: {shown}" in capsys.readouterr().out


def test_best_needs_a_monitored_value(conf: Path) -> None:
    write_checkpoint(f"{RUN}/step=1", 1, metrics={"val_loss": 0.5})
    problem = refusal(conf, "ckpt_path=best", verb="test")
    assert "train with checkpoint=best" in problem
    assert "ckpt_path=last" in problem


def test_runs_with_their_own_directory_are_found(conf: Path) -> None:
    """The newest of them, and of those under runs/; not those that were refused or removed."""
    write_checkpoint(f"{RUN}/step=1", 1)
    for path in ("first", "second"):
        cfg = compose("mine", [f"run_dir={path}", "max_steps=1"], config_dir=conf)
        run.run(cfg)
        assert decided(conf, "ckpt_path=last", verb="test") == f"{path}/checkpoints/step=1"
    shutil.rmtree("second")
    assert decided(conf, "ckpt_path=last") == "first/checkpoints/step=1"
    with pytest.raises(ConfigError):
        run.run(compose("mine", ["run_dir=third", "max_steps=1", "trainer.gradient_clip_val=-1"], config_dir=conf))
    assert "third" not in Path("runs/mine/elsewhere.txt").read_text()


def test_no_good_checkpoint(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decided(conf, "resume=auto") is None
    path = write_checkpoint(f"{RUN}/step=1", 1)
    cut_short(path)
    problem = refusal(conf, "ckpt_path=last")
    assert "no good checkpoint" in problem
    assert f"{path}: {RANK_FILE} (written by rank 0): truncated".replace(str(Path(path)), "") in problem.replace(
        str(Path(path).absolute()), ""
    )
    cfg, problems = planned(conf, "resume=auto")
    assert problems == []
    # The ranks look again, and say why it is passed over.
    assert (cfg.ckpt_path, list(cfg.resume_folders)) == (None, [RUN])


def test_auto_starts_in_a_run_dir_without_checkpoints(conf: Path) -> None:
    run.prepare(compose("mine", ["run_dir=here"], config_dir=conf), "fit")
    assert "resume=auto" in refusal(conf, "run_dir=here")
    assert decided(conf, "run_dir=here", "resume=auto") is None


def test_configured_checkpoint_folders(conf: Path) -> None:
    write_checkpoint("elsewhere/step=5", 5)
    write_checkpoint(f"{RUN}/step=1", 1)
    for more in ((), ("run_dir=new",)):
        assert decided(conf, "ckpt_path=last", "checkpoint.last.dirpath=elsewhere", *more) == "elsewhere/step=5"
    write_checkpoint("memory://planned/step=3", 3)
    cfg, problems = planned(conf, "ckpt_path=last", "checkpoint.last.dirpath=memory://planned")
    assert (cfg.ckpt_path, problems) == ("memory://planned/step=3", [])


def test_paths_with_equals_signs(conf: Path) -> None:
    write_checkpoint("a b/epoch=1-step=2", 2)
    assert decided(conf, "ckpt_path=a b/epoch=1-step=2") == "a b/epoch=1-step=2"
    assert decided(conf, "ckpt_path='a b/epoch=1-step=2'") == "a b/epoch=1-step=2"


@pytest.mark.sample(3)
@pytest.mark.parametrize(("overrides", "parts"), [
    (["resume=yes"], ["resume=", "resume=auto", "resume=null"]),
    (["ckpt_path=c", "resume=auto"], ["ckpt_path=c with resume=auto", "leave one out"]),
    (["ckpt_path=c", "init_from=c"], ["init_from=c with ckpt_path=c", "leave one out"]),
    (["trust=true"], ["trust=true without a checkpoint"]),
    (["trust=true", "init_from=c"], ["trust=true without a checkpoint"]),
    (["trust=true", "ckpt_path=c"], ["trust=true has no effect"]),
    (["strict=false"], ["strict=false", "ckpt_path and init_from"]),
    (["resume_folders=[c]"], ["resume_folders", "resume=auto"]),
    (["init_from=nowhere"], ["init_from=nowhere", "no such file"]),
    (["init_from=my_module.py"], ["my_module.py", ".safetensors", "checkpoint import my_module.py"]),
    (["init_from=http://x/y"], ["http", "fetch"]),
    (["trainer.data_partition=hsh"], ["did you mean hash?", "interleave, range"]),
    (["trainer.data_key=a:b"], ["trainer.data_key=a:b", "trainer.data_partition=hash"]),
])  # fmt: skip
def test_contradictions(conf: Path, overrides: list[str], parts: list[str]) -> None:
    write_checkpoint("c", 1)
    problem = refusal(conf, *overrides)
    for part in parts:
        assert part in problem


def test_resume_auto_needs_fit(conf: Path) -> None:
    assert "type ckpt_path=last" in refusal(conf, "resume=auto", verb="test")


def test_resume_auto_with_init_from(conf: Path) -> None:
    weights = write_checkpoint("weights", 1)
    assert decided(conf, "resume=auto", f"init_from={weights}", "strict=false") is None


def test_data_partition_choices() -> None:
    [field] = [each for each in fields(config.TrainerConfig) if each.name == "data_partition"]
    assert field.metadata["words"] == partition.PARTITIONS


@pytest.mark.thorough
def test_paths_without_a_checkpoint(conf: Path, tmp_path: Path) -> None:
    path = write_checkpoint(f"{RUN}/step=1", 1)
    said = {
        "nowhere": ["no such file or folder", "the newest of mine: ckpt_path=", "step=1"],
        f"{path}/{RANK_FILE}": ["one file of a checkpoint", f"ckpt_path={path}"],
        RUN: ["contains checkpoints, but is not one", "step=1"],
        "runs/mine/2026-01-01": ["contains checkpoints, but is not one", "step=1"],
        "link": ["is a link to gone, which does not exist"],
        "empty": ["has no manifest.json"],
        "deepspeed": ["DeepSpeed", "checkpoint import deepspeed", "ckpt_path=imported"],
        "torch": [".metadata is a pickle", "trust=true"],
        "weights": ["init_from=weights"],
        "weights/a.safetensors": ["init_from=weights/a.safetensors"],
        "memory://nothing/here": ["memory://nothing/here"],
    }
    for name, file in (("empty", "x"), ("deepspeed", "latest"), ("torch", ".metadata"), ("weights", "a.safetensors")):
        Path(name).mkdir()
        (Path(name) / file).touch()
    Path("link").symlink_to("gone")
    for given, parts in said.items():
        problem = refusal(conf, f"ckpt_path={given}")
        for part in (f"ckpt_path={given}: ", *parts):
            assert part in problem
    assert decided(conf, "ckpt_path=torch", "trust=true") == "torch"


def test_damaged_checkpoints(conf: Path) -> None:
    path = Path(write_checkpoint("c", 1))
    cut_short(path)
    problem = refusal(conf, "ckpt_path=c")
    assert f"{RANK_FILE} (written by rank 0): truncated" in problem
    flip_bit(path, "manifest.json", at=9)
    assert "manifest.json (written by rank 0)" in refusal(conf, "ckpt_path=c")
    (path / "manifest.json").unlink()
    assert "has no manifest.json" in refusal(conf, "ckpt_path=c")


def test_permissions(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint("c", 1)
    # A mode of 0 does not stop root, whom CI often is.
    access = os.access
    monkeypatch.setattr(check_resume.os, "access", lambda path, mode: Path(path).name != "c" and access(path, mode))
    assert "cannot be read by this user" in refusal(conf, "ckpt_path=c")
    assert "cannot be read by this user" in refusal(conf, "init_from=c")


def test_checkpoint_files(conf: Path) -> None:
    torch.save({}, "a.ckpt")
    assert decided(conf, "ckpt_path=a.ckpt") == "a.ckpt"
    assert decided(conf, "ckpt_path=a.ckpt", "trust=true") == "a.ckpt"
    for name, objects in ("plain", {}), ("pickled", {"loss": torch.nn.PReLU()}):
        write_file(Content({"state_dict": {}}, {}, {"kind": "run state"}, objects=objects), f"{name}.ckpt")
    assert decided(conf, "ckpt_path=plain.ckpt") == "plain.ckpt"
    assert "trust=true has no effect" in refusal(conf, "ckpt_path=plain.ckpt", "trust=true")
    assert re.search("pickled.ckpt: .*objects into .'loss'.*type trust=true", refusal(conf, "ckpt_path=pickled.ckpt"))
    assert decided(conf, "ckpt_path=pickled.ckpt", "trust=true") == "pickled.ckpt"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/a.ckpt"
        assert planned(conf, f"ckpt_path={address}")[1] == []
    [problem] = planned(conf, f"ckpt_path={address}")[1]
    assert "cannot connect to 127.0.0.1" in problem


def test_changed_global_batch(conf: Path) -> None:
    write_checkpoint("c", 1, global_batch_size=8)
    assert decided(conf, "ckpt_path=c", "global_batch_size=8") == "c"
    problem = refusal(conf, "ckpt_path=c", "global_batch_size=16")
    for part in ("global_batch_size=16", "trained with 8", "type global_batch_size=8", "allow_changed_data=true"):
        assert part in problem
    assert decided(conf, "ckpt_path=c", "global_batch_size=16", "trainer.allow_changed_data=true") == "c"
    assert decided(conf, "ckpt_path=c", "global_batch_size=16", verb="validate") == "c"


def test_insufficient_disk_space(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint("c", 1)
    monkeypatch.setattr(check_resume, "free_bytes", lambda path: 10)
    problem = refusal(conf, "ckpt_path=c")
    for part in ("checkpoint.last.dirpath", "10 B are free", "another checkpoint.last.dirpath="):
        assert part in problem
    assert decided(conf, "ckpt_path=c", "checkpoint=none") == "c"
    assert decided(conf, "ckpt_path=c", verb="test") == "c"
    assert write_errors.free_bytes(".") > 10


def test_resume_checks_do_not_import_torch(conf: Path) -> None:
    write_checkpoint(f"{RUN}/step=1", 1)
    script = (
        "import sys\n"
        "from trainwright.command import run\n"
        "from trainwright.core.processes import machine\n"
        "from trainwright.command.schema.compose import compose\n"
        "machine.num_gpus = lambda: 0\n"
        f"cfg, problems = run.plan(compose('mine', ['resume=auto'], config_dir={str(conf)!r}), 'fit')\n"
        "assert cfg.ckpt_path.endswith('step=1'), problems\n"
        "assert not {'torch', 'lightning', 'fsspec'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0, done.stderr


def test_resuming_past_a_damaged_checkpoint(conf: Path) -> None:
    """Two ranks; the contents of the newest checkpoint are damaged in between, at the same size."""
    words = ("fit", "--config-dir", str(conf), "recipe=mine", "run_dir=job", "resume=auto", "strategy=ddp", "devices=2")
    quiet = ("monitor=none", "logger=csv", "checkpoint.last.every_n_steps=1", "checkpoint.last.keep_last=3")
    first = run_command(*words, *quiet, "max_steps=3")
    assert first.returncode == 0, first.stdout
    assert "there is no checkpoint yet; starting from scratch" in first.stdout
    flip_bit("job/checkpoints/step=3")
    second = run_command(*words, *quiet, "max_steps=5")
    assert second.returncode == 0, second.stdout
    assert f"skipped {Path('job/checkpoints/step=3').absolute()}: {RANK_FILE} (written by rank 0)" in second.stdout
    assert "step=2" in Path("job/logs/rank_0.log").read_text()
    found = json.loads(run_command("checkpoint", "list", "job", "--deep", "--json").stdout)
    assert [(row["step"], row["state"]) for row in found][:3] == [(5, "good"), (4, "good"), (3, "good")]


def test_resume_messages(conf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("trainwright.command.verbs.launch", lambda cfg, *_: started.append(cfg.ckpt_path))
    words = ["fit", "--config-dir", str(conf), "recipe=mine", "resume=auto"]
    assert main(words) == 0
    assert "resume=auto: there is no checkpoint yet; starting from scratch" in capsys.readouterr().out
    path = write_checkpoint("runs/mine/2026-01-01/checkpoints/step=1", 1)
    assert main(words) == 0
    assert f"resuming from {path}" in capsys.readouterr().out
    flip_bit(path, "manifest.json", at=9)
    assert main(words) == 0
    assert "no good checkpoint among those in runs/mine/2026-01-01/checkpoints" in capsys.readouterr().out
    assert [bool(each) for each in started] == [False, True, False]
