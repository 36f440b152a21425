"""``trainwright verify``: arithmetic, findings, refusals and cleanup."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.command.project import command, environment, write_project
from tests.warm import WarmPopen, warm_run
from trainwright.command.cli import main
from trainwright.command.verify_options import VerifyOptions, take_options
from trainwright.core.processes import machine
from trainwright.tools.verify.compare import (
    FLOOR,
    ROUNDING,
    Record,
    compare_losses,
    compare_samples,
    compare_tensors,
    exclude_rounding,
    find_start,
)
from trainwright.tools.verify.record import disable_dropout, hash_samples, write_tensors
from trainwright.tools.verify.report import VerifyReport, groups_of

TOLERANCE = 1e-5


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    shutil.copy(Path(__file__).parents[1] / "launch" / "faulty.py", tmp_path)
    return write_project(tmp_path)


# ---- options ---------------------------------------------------------------------------------------------------------


def test_options_are_separated() -> None:
    words = ["recipe=gpt", "verify.steps=7", "devices=2", "verify.tolerance=1e-3"]
    assert take_options(words) == (VerifyOptions(7, 1e-3), ["recipe=gpt", "devices=2"], [])
    assert VerifyOptions(7, 1e-3).problems("bf16-mixed") == []
    assert VerifyOptions().bound == 1e-5


@pytest.mark.parametrize(
    ("words", "precision", "parts"),
    [
        (["verify.steps=0"], "32", ["verify.steps=0", "at least 1"]),
        (["verify.steps=2.5"], "32", ["verify.steps=2.5", "whole number"]),
        (["verify.steps=true"], "32", ["verify.steps=true", "whole number"]),
        (["verify.tolerance=0"], "32", ["verify.tolerance=0", "above 0"]),
        (["verify.tolerance=tight"], "32", ["verify.tolerance=tight"]),
        (["verify.stepz=3"], "32", ["verify.stepz=3", "did you mean verify.steps?"]),
        (["verify=3"], "32", ["verify=3", "keys: verify.steps, verify.tolerance"]),
        ([], "bf16-mixed", ["precision=bf16-mixed", "verify.tolerance=0.01"]),
    ],
)
def test_impossible_options(words: list[str], precision: str, parts: list[str]) -> None:
    options, _, problems = take_options(words)
    text = " ".join([*problems, *options.problems(precision)])
    for part in parts:
        assert part in text


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_losses() -> None:
    found = compare_losses([1.0, 1.0 + 2e-5, None, None, float("nan")], [1.0, 1.0, 1.0, None, 1.0], TOLERANCE)
    assert [one.passed for one in found] == [True, False, False, True, False]
    assert found[1].difference == pytest.approx(2e-5)
    assert [one.step for one in found] == [1, 2, 3, 4, 5]


def _vector(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def test_tensors_are_compared_relative_to_norm_and_floor() -> None:
    reference = {"large": _vector(3.0, 4.0), "small": _vector(1e-6, 0.0)}
    layout = {"large": _vector(3.0, 4.0 + 1e-3), "small": _vector(2e-6, 0.0)}
    large, small = compare_tensors(1, layout, reference, TOLERANCE)
    assert large.difference == pytest.approx(1e-3 / 5, rel=1e-3)
    assert not large.passed
    # Twice as large, but small relative to the other.
    assert small.difference == pytest.approx(1e-6 / (FLOOR * 5), rel=1e-3)
    assert not small.passed
    [alone] = compare_tensors(1, {"a": _vector(0.0)}, {"a": _vector(0.0)}, TOLERANCE)
    assert alone.passed
    tiny = compare_tensors(1, {**reference, "small": _vector(1e-6 + 1e-7, 0.0)}, reference, TOLERANCE)
    assert all(one.passed for one in tiny)


def test_wrong_scale_is_reported() -> None:
    reference = {"a": _vector(1.0, 2.0), "b": _vector(1.0, 2.0)}
    scaled, turned = compare_tensors(1, {"a": _vector(2.0, 4.0), "b": _vector(2.0, -1.0)}, reference, TOLERANCE)
    assert scaled.factor == pytest.approx(2.0)
    assert scaled.difference == pytest.approx(1.0)
    assert turned.factor is None


def test_missing_tensors_and_other_shapes() -> None:
    reference = {"a": _vector(1.0), "b": _vector(0.0), "c": _vector(1.0, 1.0)}
    a, b, c, extra = compare_tensors(1, {"c": _vector(1.0), "d": _vector(1.0)}, reference, TOLERANCE)
    assert (a.difference, a.passed) == (1.0, False)
    assert (b.difference, b.passed) == (0.0, True)
    assert not c.passed
    assert (extra.name, extra.passed) == ("d", False)
    [nan] = compare_tensors(1, {"a": _vector(float("nan"))}, {"a": _vector(1.0)}, TOLERANCE)
    assert not nan.passed


def test_elements_with_rounding_gradients_are_excluded() -> None:
    noise = 0.5 * ROUNDING
    reference, layout = {"a": _vector(1.0, noise, 0.0, noise)}, {"a": _vector(1.0, -noise, 0.0, noise)}
    rounding: dict[str, Any] = {}
    exclude_rounding(rounding, layout, reference)
    parameters = {"a": _vector(1.0, 0.1, 1.0, 1.0)}
    [one] = compare_tensors(1, {"a": _vector(1.0, 0.2, 1.0, 1.0)}, parameters, TOLERANCE, rounding)
    assert (one.passed, one.left_out) == (True, 1)
    # Equal noise and zero gradients are not excluded.
    for moved in ((1.0, 0.1, 1.1, 1.0), (1.0, 0.1, 1.0, 1.1), (1.1, 0.1, 1.0, 1.0)):
        [one] = compare_tensors(1, {"a": _vector(*moved)}, parameters, TOLERANCE, rounding)
        assert not one.passed


def test_groups() -> None:
    names = ["model.blocks.0.up.weight", "model.blocks.0.down.weight", "model.blocks.1.up.weight", "model.head.bias"]
    assert list(groups_of(names)) == ["blocks.0", "blocks.1", "head"]
    assert groups_of(names)["blocks.0"] == names[:2]
    assert list(groups_of(["net.0.weight", "net.0.bias", "net.2.weight"])) == ["net.0", "net.2"]
    names = ["enc.layers.0.a.weight", "enc.layers.1.a.weight", "out.weight", "scale"]
    assert list(groups_of(names)) == ["enc.layers.0", "enc.layers.1", "out", "scale"]
    assert list(groups_of(["weight"])) == ["weight"]


# ---- records ---------------------------------------------------------------------------------------------------------


def _record(folder: Path, samples: list[list[list[str]]], data_ranks: list[int] | None = None) -> Record:
    """Write a record of one step; ``samples[rank]`` are the rank's micro-batches."""
    folder.mkdir()
    claimed = data_ranks or list(range(len(samples)))
    for rank, of_rank in enumerate(samples):
        content = {"data_rank": claimed[rank], "losses": [1.0], "samples": [of_rank]}
        (folder / f"rank_{rank}.json").write_text(json.dumps(content))
    run = {"micro_batch_size": 2, "data_ranks": max(claimed) + 1, "steps": 1, "stepped": {}}
    (folder / "run.json").write_text(json.dumps(run))
    return Record(folder)


def test_samples(tmp_path: Path) -> None:
    one = _record(tmp_path / "one", [[["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]])

    def texts(name: str, *samples: list[list[str]], data_ranks: list[int] | None = None) -> str:
        return " ".join(compare_samples(_record(tmp_path / name, [*samples], data_ranks), one).values())

    first, second = [["a", "b"], ["e", "f"]], [["c", "d"], ["g", "h"]]
    assert texts("right", first, second) == ""
    assert texts("other order", second, first) == ""
    assert texts("twice", first, first) == (
        "step 1: samples differ: data rank 1 read wrong samples (4 read more than once, 4 of 8 not read)"
    )
    assert "data rank 0 read wrong samples (1 read from other steps, 1 of 8 not read)" in texts(
        "foreign", [["a", "x"], ["e", "f"]], second
    )
    # Four ranks, pairs of which share samples.
    sharing = [0, 0, 1, 1]
    assert texts("sharing", first, first, second, second, data_ranks=sharing) == ""
    assert "rank 3 must read the samples of rank 2" in texts("odd", first, first, second, first, data_ranks=sharing)


def test_tensors_are_read_back(tmp_path: Path) -> None:
    record = _record(tmp_path / "record", [[["a"]]])
    tensors = {
        "weight": torch.randn(3, 4).t(),
        "scalar": torch.tensor(2.0, requires_grad=True),
        "empty": torch.zeros(0, 3),
        "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "double": torch.tensor([1 / 3], dtype=torch.float64),
    }
    write_tensors(record.folder / "gradients_1", tensors.items())
    assert record.has("gradients", 1)
    assert not record.has("gradients", 2)
    read = record.tensors("gradients", 1)
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert np.array_equal(read[name].reshape(-1), tensor.detach().double().reshape(-1).numpy()), name
    assert all(one.passed and one.distance == 0 for one in compare_tensors(1, read, read, TOLERANCE))


def test_hashes_of_samples() -> None:
    x, y = torch.randn(4, 3), torch.tensor([True, False, True, True])
    whole = hash_samples({"x": x, "more": (y, "text", 3, torch.tensor(1.0))})
    assert len(set(whole)) == 4
    assert whole == [hash_samples({"x": x[i : i + 1], "more": [y[i : i + 1]]})[0] for i in range(4)]
    assert hash_samples({"x": x.t().contiguous().t(), "more": [y]}) == whole  # independent of strides
    assert hash_samples([x + 1, y]) != whole
    assert hash_samples("nothing") == hash_samples(torch.zeros(0, 2)) == []


def test_dropout_is_disabled() -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.2)
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), attention, nn.AlphaDropout(0.0), nn.PairwiseDistance())
    module.drop_path_rate = 0.3  # type: ignore[assignment]
    module.has_dropout = True  # type: ignore[assignment]
    assert disable_dropout(module) == ["drop_path_rate", "1.p", "2.dropout"]
    assert (module[1].p, module[2].dropout, module[4].norm, module.has_dropout) == (0.0, 0.0, 2.0, True)
    assert disable_dropout(module) == []


def test_first_difference_in_order_of_execution() -> None:
    reference = {"a.weight": _vector(1.0), "b.weight": _vector(1.0)}
    good = compare_tensors(1, reference, reference, TOLERANCE)
    bad = compare_tensors(2, {"a.weight": _vector(2.0), "b.weight": _vector(2.0)}, reference, TOLERANCE)
    losses = compare_losses([1.0, 1.0], [1.0, 1.0], TOLERANCE)

    def start(losses: Any, gradients: Any, parameters: Any, execution: list[str]) -> tuple[Any, ...]:
        found = find_start([], {}, losses, gradients, parameters, execution)
        return (found.step, found.what, found.module) if found is not None else ()

    assert start(losses, [*good, *bad], [], ["b", "a"]) == (2, "gradients", "b")
    assert start(losses, good, good, []) == ()
    assert start(losses, good, bad, []) == (2, "parameters", "a")
    # With several optimizers there are more steps than losses.
    assert start(losses[:1], [*good, *bad], [], []) == (2, "gradients", "a")
    assert start(compare_losses([1.0, 2.0], [1.0, 1.0], TOLERANCE), [*good, *bad], [], []) == (2, "loss", "a")
    # Different initial parameters explain all later differences.
    initial = compare_tensors(0, {**reference, "b.weight": _vector(2.0)}, reference, TOLERANCE)
    assert start(losses, bad, initial, []) == (0, "parameters", "b")


def test_report() -> None:
    names = [f"layers.{number}.weight" for number in range(40)]
    reference = {name: _vector(1.0) for name in names}
    layout = {**reference, names[30]: _vector(float("nan"))}
    gradients = [one for step in range(1, 11) for one in compare_tensors(step, layout, reference, TOLERANCE)]
    losses = compare_losses([1.0] * 10, [1.0] * 10, TOLERANCE)
    start = find_start([], {}, losses, gradients, gradients, [])
    report = VerifyReport(
        "mine", "DDPStrategy", 2, {"replicate": 2}, "32", TOLERANCE, "8 samples per step", [], losses, [], gradients,
        gradients, [], start,
    )  # fmt: skip
    assert not report.passed
    text = report.to_text()
    assert "layers.30" in text
    assert "... and 16 modules with smaller differences" in text
    assert "FAILED, tolerance 1e-05: the first difference is at step 1, in module layers.30" in text
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (document["passed"], document["start"]["module"], document["steps"]) == (False, "layers.30", 10)
    assert document["gradients"][30]["difference"] is None  # not a number


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["verify.steps=0", "verify.stepz=1"], ["1. verify.stepz=1", "2. verify.steps=0"]),
        (["precision=bf16-mixed"], ["precision=bf16-mixed", "verify.tolerance="]),
        (["strategy=zer3", "verify.steps=0"], ["did you mean zero3?", "verify.steps=0"]),
        (["ckpt_path=x", "run_dir=here"], ["ckpt_path=x: verify starts", "run_dir=here: verify keeps no files"]),
        (["micro_batch_size=null"], ["global_batch_size and micro_batch_size are both null"]),
        (["strategy=single"], ["strategy=single trains on one device"]),
        (["-m", "strategy=ddp,zer3"], ["did you mean zero3?"]),
        (["verify.steps=1,2"], ["verify.steps="]),
    ],
)
def test_refused(words: list[str], parts: list[str], conf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path.cwd().iterdir())
    assert main(["verify", "--config-dir", str(conf), "recipe=mine", "devices=2", *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    for part in parts:
        assert part in err
    assert sorted(Path.cwd().iterdir()) == before


def test_verify_keys_with_other_verbs(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config-dir", str(conf), "recipe=mine", "--json"]) == 2
    assert "--json: only verify" in capsys.readouterr().err
    assert main(["fit", "--config-dir", str(conf), "recipe=mine", "verify.steps=2"]) == 2
    assert "verify.steps=2: " in capsys.readouterr().err
    assert main(["verify", "--help"]) == 0
    text = capsys.readouterr().out
    assert "verify.tolerance (number or null" in text
    assert "--json" in text
    assert main(["verify", "--config-dir", str(conf), "recipe=mine", "verify.steps=2", "--print-config"]) == 0


def _temporary_files(pid: int) -> list[Path]:
    """Return temporary files of a launching process."""
    parents = {Path("/tmp"), Path(tempfile.gettempdir())}
    return [path for parent in parents for path in parent.glob(f"trainwright-{pid}-*")]


@pytest.mark.thorough
def test_layouts_equal_one_process(tmp_path: Path) -> None:
    words = ("--json", "verify", "-m", "recipe=digits", "strategy=zero3,ddp", "devices=2", "module.blocks=2")
    words += ("--config-dir", str(tmp_path), "--report", str(tmp_path / "page.html"))
    process = WarmPopen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    report, of_ddp = json.loads(out)  # and nothing else
    assert of_ddp["passed"]
    page = (tmp_path / "page.html").read_text()
    assert page.count("<td>equal</td>") == 2
    assert "strategy=ddp</th>" in page
    assert f"devices=2 module.blocks=2 --config-dir {tmp_path} --report" in page
    assert report["passed"]
    assert report["start"] is None
    assert report["layout"] == {"shard": 2}
    assert report["global_batch"] == "8 samples x 2 accumulated x 2 data rank(s) = 32 samples per step"
    assert len(report["losses"]) == 4
    assert all(one["reference"] > 0 and one["difference"] < TOLERANCE for one in report["losses"])
    modules = {one["module"]: one for one in report["modules"]}
    assert list(modules) == ["stem", "blocks.0", "blocks.1", "norm", "head"]
    assert all(len(one["gradients"]) == 4 and one["parameters"] < TOLERANCE for one in modules.values())
    assert {one["step"] for one in report["parameters"]} == {0, 1, 2, 3, 4}
    # The runs trained.
    ends = {one["step"]: one["norm"] for one in report["parameters"] if one["name"] == "stem.bias"}
    assert ends[0] != ends[4]
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert _temporary_files(process.pid) == []


FAULTS = """
import json, sys
sys.path.insert(0, "")
import trainwright
from trainwright.command.cli import main
from trainwright.tools.verify.verify import verify

words = ["recipe=mine", "devices=2", "strategy=zero2", "strategy._target_=faulty.SummedZeroStrategy", "verify.steps=1"]
found = {"exit code": main(["verify", "--config-dir", "my_conf", *words])}
for strategy, target in json.loads(sys.argv[1]):
    words = ["devices=2", "strategy=" + strategy, *(["strategy._target_=faulty." + target] if target else [])]
    report = verify(trainwright.compose("mine", words, config_dir="my_conf"))
    found[target or strategy] = [report.passed, report.start and vars(report.start), report.to_text()]
print("\\n" + json.dumps(found))
"""
CASES = [
    ("ddp", None), ("zero2", None), ("ddp", "UnsyncedDDPStrategy"), ("zero2", "SummedZeroStrategy"),
    ("zero3", "MissharedZeroStrategy"), ("zero3", "StaleZeroStrategy"), ("ddp", "SameSamplesDDPStrategy"),
]  # fmt: skip


def test_faulty_strategies_are_found(conf: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", FAULTS, json.dumps(CASES)]
    done = warm_run(words, capture_output=True, env=environment(), timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mine: SummedZeroStrategy stage 2")  # ranks print to stderr
    assert "the first difference is at step 1, in module net.0" in done.stdout
    assert "first step of rank 0" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("exit code") == 1
    for good in ("ddp", "zero2"):
        assert found[good][0], found[good][2]
    starts = {name: start for name, (passed, start, _) in found.items() if not passed}
    assert {name: (start["step"], start["what"], start["module"]) for name, start in starts.items()} == {
        "UnsyncedDDPStrategy": (1, "gradients", "net.2"),
        "SummedZeroStrategy": (1, "gradients", "net.0"),
        "MissharedZeroStrategy": (0, "parameters", "net.0"),
        "StaleZeroStrategy": (2, "parameters", "net.0"),
        "SameSamplesDDPStrategy": (1, "samples", None),
    }
    assert "2 times that of one process" in starts["SummedZeroStrategy"]["text"]
    assert "data rank 1 read wrong samples (4 of 8 not read)" in starts["SameSamplesDDPStrategy"]["text"]
    assert all("FAILED" in found[name][2] for name in starts)
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"my_module.py", "my_conf", "faulty.py"}


def test_interrupt_leaves_no_files(conf: Path, tmp_path: Path) -> None:
    options = ("strategy=ddp", "module.sleep=0.5", "launch.grace_seconds=0.5")
    words = ("verify", "--config-dir", str(conf), "recipe=mine", "devices=2", *options)
    process = WarmPopen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    assert process.stdout is not None
    for line in process.stdout:
        if "first step of rank 0" in line:
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 143, out
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"my_module.py", "my_conf", "faulty.py"}
    assert _temporary_files(process.pid) == []
