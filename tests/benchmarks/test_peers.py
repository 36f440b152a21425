from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.peers import gpu
from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.peers.field import BY_HAND, FIELD, LAYOUTS, OURS, SIDES, Place, count_lines, sides_of
from benchmarks.peers.measure import Measured, measure_alone, measure_layout
from benchmarks.peers.race import PeerError, Piece, Runner, last_error
from benchmarks.peers.rows import goals_of, rows_of, table_of_errors
from benchmarks.peers.task import Task

TINY = Task(sizes={"layers": 1, "dim": 16, "heads": 2, "seq_len": 8}, batch=2, warm_up=1, steps=2, pieces=2)
# A peer of two ranks in one process, which says what it would say, and waits for its turns.
SPEAKER = """
import json, os, socket
ranks = [socket.socket(socket.AF_UNIX) for _ in range(2)]
for rank in ranks:
    rank.connect(os.environ["TRAINWRIGHT_BENCHMARK_PEERS_SOCKET"])
for turn in range(3):
    for number, rank in enumerate(ranks):
        told = {"rank": number, "wall": 1.0 + number, "cpu": 2.0, "written": 10 * (number + 1), "peak": 5 - number}
        told |= {"moment": 7.0 + number, "losses": [1.0 + number] if turn else []}
        rank.sendall(json.dumps(told).encode() + b"\\n")
    for rank in ranks:
        if turn < 2 and not rank.recv(1):
            raise SystemExit(1)
"""


def _measured(step_seconds: float, **more) -> Measured:
    pieces = [Piece(step_seconds * 2, 1.0, 4096.0, 2**20, (1.0, 2.0), 0.0) for _ in range(2)]
    return Measured(lines=3, version=None, steps=2, starts=[5.0], pieces=pieces, losses=[4.0, 2.0], **more)


def test_a_runner_gathers_its_ranks_and_gives_turns(tmp_path):
    runner = Runner([sys.executable, "-c", SPEAKER], {}, 2, TINY, tmp_path)
    first = runner.piece()
    assert (first.wall, first.cpu, first.written, first.peak, first.losses) == (2.0, 4.0, 15.0, 5, ())
    assert first.moment == 8.0
    runner.go()
    assert runner.piece().losses == (1.5,)
    runner.go()
    runner.piece()
    runner.close(ended=True)
    assert runner._process.returncode == 0


def test_a_command_that_fails_says_so_in_its_own_words(tmp_path):
    runner = Runner([sys.executable, "-c", "raise ValueError('no such layout')"], {}, 2, TINY, tmp_path)
    with pytest.raises(PeerError, match="ValueError: no such layout"):
        runner.piece()
    runner.close(ended=False)


def test_a_command_that_says_nothing_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.peers.race.PATIENCE", 0.2)
    runner = Runner([sys.executable, "-c", "import time; time.sleep(60)"], {}, 1, TINY, tmp_path)
    with pytest.raises(PeerError, match="said nothing"):
        runner.piece()
    begin = time.monotonic()
    runner.close(ended=False)
    assert time.monotonic() - begin < 30
    assert runner._process.returncode is not None


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("[rank1]: RuntimeError: mixed\nroot\ntorch...ChildFailedError: x FAILED", "RuntimeError: mixed"),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: x", "torch.distributed.elastic"),
        ("one\nlast words\n\n", "last words"),
        ("", "it ended without a word"),
    ],
)
def test_the_error_is_the_peers_and_not_its_launchers(printed, words):
    assert last_error(printed).startswith(words)


def test_lines_that_users_write_are_counted(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        '"""Two\nlines."""\n\n# why\nimport os\n\n\ndef f():\n    """Doc."""\n    return os\nt()  # bench\n'
    )
    assert count_lines(script) == 3
    config = tmp_path / "config.yaml"
    config.write_text("# why\na:\n  b: 1\n\n")
    assert count_lines(config) == 2


def test_every_side_has_its_files_for_every_layout():
    for side in FIELD:
        for layout in side.layouts:
            assert side.lines(layout) > 0
    used = {name for side in FIELD for layout in side.layouts for name in side.files(layout)}
    scripts = {str(file.relative_to(SIDES)) for file in [*SIDES.glob("*.py"), *SIDES.rglob("*.yaml")]}
    assert scripts - used == {"__init__.py", "lightning_turns.py"}
    for layout in LAYOUTS:
        assert [sides_of(layout)[0].name, sides_of(layout)[-1].name] == [BY_HAND, OURS]
        assert [side.name for side in sides_of(layout, [OURS])] == [BY_HAND, OURS]


def test_an_environment_that_is_not_there_says_what_to_type(tmp_path):
    environment = ENVIRONMENTS["deepspeed"]
    with pytest.raises(RuntimeError, match=r"type python -m benchmarks\.peers\.install --cache"):
        environment.python(tmp_path)
    environment.folder(tmp_path).mkdir()
    (environment.folder(tmp_path) / "error.txt").write_text("ERROR: no wheel")
    with pytest.raises(RuntimeError, match="could not be installed: ERROR: no wheel"):
        environment.python(tmp_path)
    assert all(each.version()[0].isdigit() for each in ENVIRONMENTS.values())


def test_a_peer_that_is_not_installed_is_a_row_and_the_others_go_on(tmp_path):
    missing = next(side for side in FIELD if side.name == "DeepSpeed")
    speaker = replace(FIELD[0], command=lambda place: [sys.executable, "-c", SPEAKER])
    place = Place("ddp", 2, tmp_path, tmp_path, replace(TINY, pieces=1))
    found = measure_layout([speaker, missing], place, 1)
    assert len(found[BY_HAND].pieces) == 1
    assert found[BY_HAND].losses == [1.5, 1.5]
    rows = rows_of({"ddp": found})
    assert [row["side"] for row in rows if row["error"]] == ["DeepSpeed"]
    assert table_of_errors(rows, "layout")[0].row_count == 1
    assert len(measure_alone([speaker, missing], place, 1, rounds=2)[BY_HAND].pieces) == 2


def test_rows_hold_ours_against_by_hand_and_the_fastest_peer():
    sides = {BY_HAND: _measured(0.1), "Lightning": _measured(0.105), OURS: _measured(0.102)}
    sides[OURS].losses = [4.0, 2.00002]
    sides["DeepSpeed"] = Measured(1, "1.0", 2, error="no")
    rows = {row["side"]: row for row in rows_of({"ddp": sides})}
    ours = rows[OURS]
    assert (ours["step_ms"], ours["ratio"], ours["sent_kib"], ours["peak_mib"]) == (102.0, 1.02, 2, 1)
    assert ours["loss_diff"] == pytest.approx(1e-5)
    assert rows["DeepSpeed"]["step_ms"] is None
    goals = {goal.name: goal for goal in goals_of(list(rows.values()))}
    assert not goals["step to that by hand, ddp"].holds
    assert goals["step to that of the fastest peer, ddp"].value == pytest.approx(102 / 105)
    assert goals["seconds to the first step, ddp"].holds
    assert len(goals) == 4


def test_the_page_of_a_gpu_records_what_it_measured(tmp_path):
    options = SimpleNamespace(device="cpu", micro_batch=None, ranks=2, no_compile=True, data=None, warm_up=1)
    options.steps, options.pieces = 2, 2
    task = gpu.task_of("nano", "ddp", options)
    assert (task.batch, task.bf16, task.flash, task.boundaries) == (8, True, False, (1, 2, 4, 6))
    (row,) = gpu.rows_for("nano", task, 2, {"ddp": {BY_HAND: _measured(0.5)}})
    assert row["tokens_per_s"] == 8 * 128 / 0.5
    result = {"device": "NVIDIA H200", "date": "2026-01-31T00:00:00Z", "rows": [row]}
    assert gpu.record(tmp_path, result).name == "peers-nvidia-h200-2026-01-31.json"
    again = gpu.record(tmp_path, result)
    assert again.name == "peers-nvidia-h200-2026-01-31-2.json"
    assert json.loads(again.read_text())["rows"] == [row]


@pytest.mark.thorough
def test_ours_trains_as_by_hand_in_turns(tmp_path):
    found = measure_layout(sides_of("single", [OURS]), Place("single", 1, tmp_path, tmp_path, TINY), 1)
    rows = {row["side"]: row for row in rows_of({"single": found})}
    assert [row["error"] for row in rows.values()] == [None, None]
    assert len(found[OURS].losses) == TINY.total == 6
    assert rows[OURS]["loss_diff"] <= 1e-6
