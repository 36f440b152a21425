"""The verb `checkpoint`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.command.project import environment
from tests.tools.checkpoints import RANK_FILE, cut_short, flip_bit, write_checkpoint
from trainwright.command import cli
from trainwright.command.cli import main
from trainwright.tools.checkpoints.command import size_in_bytes

LAYOUT = {"strategy": "hybrid", "layout": {"pipeline": 1, "shard": 2}, "world_size": 2, "data_ranks": 2}
METRICS = {"val_loss": 0.125, "worst": float("nan")}
ABOUT = {**LAYOUT, "global_batch_size": 64, "metrics": METRICS, "versions": {"torch": "2.13"}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return write_checkpoint(tmp_path / "step=7", 7, **ABOUT)


def output(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Return what the command prints to stdout, or the message of a refusal."""
    assert main(["checkpoint", *words]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    if code == 2:
        assert out == ""
        progress, _, message = err.partition("trainwright: ")
        assert all(line.startswith("checkpoint: ") for line in progress.splitlines())
        return message
    return out


@pytest.mark.parametrize(("words", "parts"), [
    (["verfy", "x"], ["verfy", "did you mean verify?", "export, import, inspect, list"]),
    (["--deep", "list"], ["--deep", "before the verb"]),
    (["verify"], ["PATH", "trainwright checkpoint --help"]),
    (["inspect", "x", "--jsn"], ["--jsn", "--help"]),
    (["export", "x"], ["--format"]),
    (["export", "x", "--format", "onnx"], ["onnx", "safetensors", "lightning"]),
    (["export", "x", "--format", "hf", "--max-shard-size", "5GBB"], ["5GBB", "500MB"]),
    (["import", "x"], ["--to"]),
    (["verify", "nowhere"], ["nowhere"]),
    (["list", "nowhere"], ["nowhere", "runs/<name>"]),
    (["list", "."], ["no checkpoints"]),
    (["list", __file__], ["not a folder", "runs/<name>"]),
    (["verify", ""], ["path of a checkpoint is empty"]),
    (["list", ""], ["path of a checkpoint is empty"]),
])  # fmt: skip
def test_refused(words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    err = output(capsys, *words, code=2)
    for part in parts:
        assert part in err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["checkpoint", "--help"], ["--help", "checkpoint"], ["checkpoint", "verify", "-h"]):
        assert main(words) == 0
        assert "import SOURCE" in capsys.readouterr().out
    assert main(["checkpoint"]) == 2
    assert main(["-m", "checkpoint", "list", "."]) == 2
    assert "trainwright checkpoint <verb>" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "trainwright checkpoint --help" in capsys.readouterr().out


def test_verify_starts_no_process(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(cli, "start_forkserver", lambda: pytest.fail("`checkpoint verify` is not `verify`"))
    assert output(capsys, "verify", checkpoint).startswith(f"good: {checkpoint}, step 7, 3 files")


def test_inspection_imports_no_torch(checkpoint: str) -> None:
    script = (
        "import sys\n"
        "from trainwright.command.cli import main\n"
        f"codes = [main(['checkpoint', *words, {checkpoint!r}]) for words in (['verify'], ['inspect', '--json'])]\n"
        f"codes += [main(['checkpoint', 'list', {str(Path(checkpoint).parent)!r}])]\n"
        "assert codes == [0, 0, 0], codes\n"
        "assert not {'torch', 'lightning', 'hydra'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0, done.stderr


def test_sizes() -> None:
    assert [size_in_bytes(text) for text in ("12", "5GB", "2GiB", "1.5 kb", "3B")] == [12, 5 * 10**9, 2**31, 1500, 3]


@pytest.mark.parametrize("file", [RANK_FILE, "state.json", "tensors.json", "manifest.json"])
def test_verify_names_the_file_and_the_rank(file: str, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(checkpoint, file, at=9)
    [line] = output(capsys, "verify", checkpoint, code=1).splitlines()
    assert line.startswith(f"{file} (written by rank 0): ")


def test_verify_prints_one_line_per_problem(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    cut_short(checkpoint)
    (Path(checkpoint) / "state.json").unlink()
    lines = sorted(output(capsys, "verify", checkpoint, code=1).splitlines())
    assert [line.partition(" ")[0] for line in lines] == [RANK_FILE, "state.json"]
    assert "truncated" in lines[0]
    assert "missing" in lines[1]


def test_verify_refusals(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a file" in output(capsys, "verify", f"{checkpoint}/state.json", code=2)
    assert checkpoint in output(capsys, "verify", str(Path(checkpoint).parent), code=2)
    assert "this is one checkpoint; use inspect" in output(capsys, "list", checkpoint, code=2)
    (Path(checkpoint) / "manifest.json").unlink()
    assert "not completely written" in output(capsys, "verify", checkpoint, code=2)


def test_inspect(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "inspect", checkpoint)
    layout = ("shard=2 (2 ranks, 2 of which read different samples)", "64 samples per optimizer step", "rank 0")
    sizes = ("in 3 files", "2 tensors, 32 B", "val_loss=0.125, worst=NaN", "torch 2.13")
    for part in ("kind          run state", "step          7", *layout, *sizes):
        assert part in text, part
    assert text.splitlines()[-1].split() == ["weights/layer.1", "2x2", "float32", "16"]


def test_inspect_as_json(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "inspect", checkpoint, "--json"))
    assert found["about"]["metrics"] == {"val_loss": 0.125, "worst": "NaN"}
    assert found["about"]["step"] == 7
    assert found["tensors"][1] == {"name": "weights/layer.1", "shape": [2, 2], "dtype": "float32", "bytes": 16}
    sizes = {path.name: path.stat().st_size for path in Path(checkpoint).iterdir() if path.name != "manifest.json"}
    assert {name: file["bytes"] for name, file in found["files"].items()} == sizes


def test_inspect_limits_the_number_of_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = write_checkpoint(tmp_path / "many", tensors=300)
    short, long = (output(capsys, "inspect", many, *words).splitlines() for words in ((), ("--all",)))
    assert len(short) < 60
    assert "260 more; --all" in short[-1]
    assert len(long) == len(short) + 259


def test_inspect_a_damaged_list_of_tensors(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(checkpoint) / "tensors.json").write_text("[]")
    assert main(["checkpoint", "inspect", checkpoint]) == 1
    assert "tensors.json (written by rank 0)" in capsys.readouterr().err


def test_list_shows_states_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/mine/2026-01-01/checkpoints")
    for step in (2, 10, 6, 4, 8):
        write_checkpoint(folder / f"step={step}", step, metrics={"val_loss": step / 4})
    cut_short(folder / "step=8")
    flip_bit(folder / "step=6")
    flip_bit(folder / "step=4", "manifest.json", at=20)
    shutil.copytree(folder / "step=2", folder / ".step=12.partial-abc")
    shutil.copytree(folder / "step=2", folder / "step=1")
    (folder / "step=1/manifest.json").unlink()
    (folder / "notes").mkdir()
    torch.save({}, folder / "last.ckpt")
    for where in (folder, folder.parent, folder.parent.parent):
        rows = json.loads(output(capsys, "list", str(where), "--json"))
        states = {Path(row["path"]).name: row["state"] for row in rows}
        expected = {"step=10": "good", "step=8": "damaged", "step=6": "good", "step=2": "good", "step=4": "damaged"}
        expected |= dict.fromkeys(("step=1", ".step=12.partial-abc"), "half-written")
        assert states == {**expected, "last.ckpt": "not checkable"}
    assert [row["step"] for row in rows if row["step"] is not None] == [10, 8, 6, 2]
    assert rows[[row["step"] for row in rows].index(10)]["metrics"] == {"val_loss": 2.5}
    deep = json.loads(output(capsys, "list", str(folder), "--deep", "--json"))
    assert {Path(row["path"]).name: row["state"] for row in deep} == {**states, "step=6": "damaged"}


def test_list_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run_name in ("2026-01-01", "2026-01-02"):
        write_checkpoint(f"runs/mine/{run_name}/checkpoints/step=3", 3, metrics={"val_loss": 0.5})
    cut_short("runs/mine/2026-01-01/checkpoints/step=3")
    head, newer, older, problem = output(capsys, "list", "runs/mine").splitlines()
    assert head.split()[:3] == ["step", "state", "size"]
    assert "3  good" in newer
    assert newer.rstrip().endswith("runs/mine/2026-01-02/checkpoints/step=3  val_loss=0.5")
    assert "damaged" in older
    assert problem.strip().startswith(f"{RANK_FILE} (written by rank 0): truncated")


def test_list_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        write_checkpoint(f"memory://listed/step={step}", step)
    rows = json.loads(output(capsys, "list", "memory://listed", "--deep", "--json"))
    assert [(row["step"], row["state"]) for row in rows] == [(2, "good"), (1, "good")]
    assert "step          2" in output(capsys, "inspect", rows[0]["path"])


def test_export_and_import(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = output(capsys, "export", checkpoint, "--format", "torch", "--dtype", "bfloat16")
    assert printed.strip().endswith("step=7.pt")
    dtypes = {name: tensor.dtype for name, tensor in torch.load("step=7.pt", weights_only=True).items()}
    assert dtypes == dict.fromkeys(("layer.0", "layer.1"), torch.bfloat16)
    output(capsys, "export", checkpoint, "--format", "safetensors", "--max-shard-size", "16", "--to", "shards")
    assert len(list(Path("shards").glob("*.safetensors"))) == 2
    assert "exists" in output(capsys, "export", checkpoint, "--format", "safetensors", "--to", "shards", code=2)
    output(capsys, "export", checkpoint, "--format", "safetensors", "--to", "shards", "--overwrite")
    for source in ("shards", "step=7.pt"):
        assert output(capsys, "import", source, "--to", "imported", "--overwrite").strip().endswith("imported")
        assert "weights/layer.1" in output(capsys, "inspect", "imported")
    assert "exists" in output(capsys, "import", "shards", "--to", "imported", code=2)


def test_export_and_import_refusals(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere" in output(capsys, "export", "nowhere", "--format", "torch", code=2)
    assert "Hugging Face" in output(capsys, "export", checkpoint, "--format", "hf", code=2)
    torch.save({"path": Path("x")}, "object.pt")
    assert "--trust" in output(capsys, "import", "object.pt", "--to", "imported", code=2)
    assert not Path("imported").exists()
    flip_bit(checkpoint)
    assert main(["checkpoint", "export", checkpoint, "--format", "torch"]) == 1
    assert f"{RANK_FILE} (written by rank 0)" in capsys.readouterr().err
    assert not Path("step=7.pt").exists()
