"""The view in the terminal: appended data, and stragglers."""

import io
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from tests.tools.report.runs import BEGAN, CONFIG, records_of, small_run, whole_run, write_records
from trainwright.tools.report.command import run_report_command
from trainwright.tools.report.files import MetricsFile, Tail
from trainwright.tools.report.watch import WatchedRun, sparkline, stragglers


def picture(watched, now=BEGAN + 10):
    console = Console(file=io.StringIO(), width=160)
    watched.update()
    console.print(watched.picture(now))
    return console.file.getvalue()


def test_run_is_followed_from_before_its_start(tmp_path):
    run = tmp_path / "run"
    watched = WatchedRun(run)
    assert "the run has not started" in picture(watched)
    run.mkdir()
    (run / "config.yaml").write_text(CONFIG)
    assert "nothing was logged yet" in picture(watched)
    (run / "metrics.csv").write_text("loss,step,step_seconds\n2.5,4,3\n")
    text = picture(watched)
    assert "step          5 of 20" in text
    assert "loss          2.5" in text
    assert "time left     45 s" in text
    with (run / "metrics.csv").open("a") as file:
        file.write("1.5,19,3\n")
    write_records(run, 0, records_of(0))
    text = picture(watched)
    assert "none: all steps are done" in text
    assert "1.5" in text
    assert "validation" in text
    assert "MFU           32.1 %" in text


def test_ranks_are_compared(tmp_path):
    run = whole_run(tmp_path / "run")
    write_records(run, 1, [{"time": BEGAN + 12, "step": 30, "kind": "step", "seconds": {"forward": 4}, "steps": 2}])
    rows = [line.split() for line in picture(WatchedRun(run)).splitlines() if line[:4].strip().isdigit()]
    assert rows[1][:6] == ["1", "30", "5.00", "MiB", "1.00", "GiB"]
    assert rows[0][6:] == ["2", "s", "backward", "50", "%,", "forward", "25", "%"]
    steps = {rank: {"time": BEGAN, "step": 20} for rank in range(4)}
    assert stragglers(steps, BEGAN + 30) == {}
    steps[2] = {"time": BEGAN, "step": 15}
    assert stragglers(steps, BEGAN + 1) == {2: "5 steps behind"}
    steps[2] = {"time": BEGAN - 60, "step": 20}
    assert stragglers(steps, BEGAN + 1) == {2: "silent for 1:01"}


def test_tail_reads_whole_lines(tmp_path):
    path = tmp_path / "file"
    tail = Tail(path, most_bytes=16)
    assert tail.read() == (False, [])
    path.write_text("head\none\ntw")
    assert tail.read() == (True, ["head", "one"])
    with path.open("a") as file:
        file.write("o\n")
    assert tail.read() == (False, ["two"])
    other = tmp_path / "other"
    other.write_text("head\n" + "".join(f"line {i}\n" for i in range(9)))
    os.replace(other, path)
    assert tail.read() == (True, ["head", "line 7", "line 8"])
    assert tail.left_out == 9 * 7 - 2 * 7


def test_repeated_steps_replace_the_first(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("loss,step\n4,0\n3,1\n2,2\n2.5,1\n")
    metrics = MetricsFile(path)
    metrics.update()
    assert metrics.columns == {"loss": [(0, 4.0), (1, 2.5)]}


def test_sparkline():
    assert sparkline([0, 7], 10) == "▁█"
    assert sparkline([1, 1, 1], 10) == "▁▁▁"
    assert len(sparkline(list(range(1000)), 60)) == 60


def test_once(tmp_path, capsys):
    assert run_report_command(["watch", str(small_run(tmp_path / "run")), "--once"]) == 0
    assert "step          20 of 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"), [(["--every", "0"], "must be between 0.1"), (["--once=1"], "`trainwright watch --help`")]
)
def test_refusals(tmp_path, capsys, words, said):
    assert run_report_command(["watch", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err


def test_interrupt(tmp_path):
    small_run(tmp_path / "run")
    words = [sys.executable, "-m", "trainwright", "watch", str(tmp_path / "run"), "--every", "0.2"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=buffered)
    try:
        assert "run" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(30) == 0
    finally:
        process.kill()
