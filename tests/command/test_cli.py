"""The command line of `trainwright`."""

import csv
import json
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.command.project import environment, run_command
from tests.warm import warm_run
from trainwright.command.cli import main

QUIET = ("monitor=none", "logger=csv", "trainer.log_every_n_steps=1")


@pytest.mark.parametrize(("words", "parts"), [
    (["fitt", "recipe=digits"], ["fitt", "did you mean fit?", "predict, profile, report, schema, test, validate"]),
    (["recipe=digits"], ["no verb was given", "trainwright fit recipe=digits"]),
    (["fit", "--multirum", "recipe=digits"], ["--multirum", "did you mean --multirun?", "--config-dir"]),
    (["fit", "--config-dir"], ["--config-dir", "trainwright --help"]),
    (["fit"], ["no recipe was given", "recipe=<name>", "digits"]),
    (["fit", "recipe=digits", "strategy=zer3"], ["did you mean zero3?"]),
    (["fit", "-m", "recipe=digits", "strategy=ddp,zer3", "devices=2"], ["did you mean zero3?", "in strategy=zer3"]),
    (["fit", "-m", "recipe=digits", "strategy="], ["strategy="]),
    (["fit", "recipe=digits", "devices=2", "max_steps=x"], ["1. max_steps=x", "2. strategy=single"]),
])  # fmt: skip
def test_refused(words: list[str], parts: list[str], conf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("trainwright: nothing was started, because")
    assert "Traceback" not in err
    for part in parts:
        assert part in err
    assert not Path("runs").exists()
    assert not Path("multirun").exists()


def test_help_and_version(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "validate          evaluate" in capsys.readouterr().out
    assert main(["fit", "--help", "--config-dir", str(conf)]) == 0
    assert "A recipe of my own." in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip().count(".") == 2
    assert main([]) == 2


def test_print_config(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config-dir", str(conf), "recipe=mine", "module.hidden=3", "--print-config"]) == 0
    cfg = OmegaConf.create(capsys.readouterr().out)
    assert cfg.module.hidden == 3
    assert cfg.data.batch_size == 4
    assert not Path("runs").exists()
    assert main(["fit", "--config-dir", str(conf), "recipe=mine", "devices=2", "--print-config"]) == 2


def test_all_verbs_in_one_process(conf: Path) -> None:
    script = Path("verbs.py")
    script.write_text(
        "import json\n"
        "from trainwright.command.cli import main\n"
        f"words = ['--config-dir', {str(conf)!r}, 'recipe=mine', *{QUIET!r}]\n"
        "codes = [main(['fit', *words, 'run_dir=first'])]\n"
        "codes += [main([verb, *words, 'run_dir=' + verb, 'ckpt_path=first/checkpoints/step=4'])\n"
        "          for verb in ('validate', 'test', 'predict')]\n"
        "codes += [main(['fit', *words, 'run_dir=first', 'ckpt_path=last', 'max_steps=6'])]\n"
        "codes += [main(['fit', *words, 'module.fail_rank=0'])]\n"
        "import trainwright\n"
        "cfg = trainwright.compose('mine', ['monitor=none', 'run_dir=api'], config_dir=words[1])\n"
        "result = trainwright.run(cfg)\n"
        "print(json.dumps([codes, str(result.run_dir), sorted(result.metrics)]))\n"
    )
    done = warm_run([sys.executable, script], capture_output=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    assert json.loads(last) == [[0, 0, 0, 0, 0, 1], "api", ["loss"]]
    # A failing run in this process tells where in the user's code.
    assert "trainwright: the run failed with ValueError: boom in rank 0\n" in done.stderr
    assert 'raise ValueError(f"boom in rank {self.global_rank}")' in done.stderr
    assert "Traceback" not in done.stderr
    assert "resuming from first/checkpoints/step=4" in done.stdout
    _check_first_run()
    assert "test_loss" in Path("test/metrics.csv").read_text()
    import torch  # here, so that the other tests of this file stay light

    predictions = torch.load("predict/predictions.pt", weights_only=True)
    assert sum(len(batch) for batch in predictions) == 10


def _check_first_run() -> None:
    """Check the first run and its continuation in the same directory."""
    names = {path.name for path in Path("first").iterdir()}
    assert {"config.yaml", "config.1.yaml", "metrics.csv", "metrics.1.csv", "checkpoints", "logs"} <= names
    assert OmegaConf.load("first/config.1.yaml").max_steps == 4  # type: ignore[union-attr]
    assert OmegaConf.load("first/config.yaml").max_steps == 6  # type: ignore[union-attr]
    assert [path.name for path in Path("first/checkpoints").iterdir()] == ["step=6"]
    assert "max_steps=6" in Path("first/logs/rank_0.log").read_text()


def test_multirun_directories(conf: Path, tmp_path: Path) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    words = ("--config-dir", str(conf), "recipe=mine", "devices=2", "trainer.log_every_n_steps=1")
    done = run_command("fit", "-m", *words, "strategy=ddp,zero3", "module.fail_rank=-1")
    assert done.returncode == 0, done.stdout
    assert {path.name for path in tmp_path.iterdir()} - before - {"__pycache__"} == {"multirun"}
    [sweep] = Path("multirun").iterdir()
    jobs = sorted(path.name for path in sweep.iterdir())
    assert jobs == ["0_strategy=ddp", "1_strategy=zero3"]
    for job in jobs:
        names = {path.name for path in (sweep / job).iterdir()}
        assert {"config.yaml", "metrics.csv", "checkpoints", "logs"} <= names
        assert any(name.startswith("events.out.tfevents.") for name in names)
        assert {path.name for path in (sweep / job / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}
        assert "\x1b" not in (sweep / job / "logs/rank_1.log").read_text()  # a progress bar is for terminals
        with (sweep / job / "metrics.csv").open() as file:
            assert [row["step"] for row in csv.DictReader(file)][-1] == "3"


def test_multirun_continues_after_a_failure(conf: Path) -> None:
    words = ("--config-dir", str(conf), "recipe=mine", *QUIET)
    done = run_command("fit", "-m", *words, "module.fail_rank=0,-1")
    assert done.returncode == 1, done.stdout
    assert "ValueError: boom in rank 0" in done.stdout
    assert "1 of 2 jobs ended well" in done.stdout
    assert "failed: job 1 (module.fail_rank=0)" in done.stdout
    [sweep] = Path("multirun").iterdir()
    assert (sweep / "1_module.fail_rank=-1/checkpoints/step=4/manifest.json").exists()


@pytest.mark.parametrize("words", [["fit", "recipe=digits"], ["doctor"], ["--help"]])
def test_removed_working_directory(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    assert main(words) == 2
    assert "the working directory was removed; change to one that exists" in capsys.readouterr().err


def test_no_loss(conf: Path) -> None:
    Path("my_silent.py").write_text(Path("my_module.py").read_text().replace("        return loss\n", ""))
    words = ("--config-dir", str(conf), "recipe=mine", "module._target_=my_silent.MyModule", *QUIET)
    done = run_command("fit", *words, "max_epochs=3", "max_steps=null")
    assert done.returncode == 1
    assert "returned None for all 16 micro-batches of the epoch, so no weight was updated" in done.stdout
    assert "Traceback" not in done.stdout
