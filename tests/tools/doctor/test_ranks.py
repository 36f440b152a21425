"""Measurements of real ranks, and the commands that start them."""

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from tests.command.project import run_command
from trainwright.command.cli import main
from trainwright.core.problems import ConfigError
from trainwright.core.run.launcher import Launcher
from trainwright.core.text.plain import rebuilt
from trainwright.strategies.contract.communication.advice import MeasuredLink
from trainwright.tools.doctor import measure
from trainwright.tools.doctor import ranks as of_ranks
from trainwright.tools.doctor.command import parse
from trainwright.tools.doctor.examination import Examination
from trainwright.tools.doctor.finding import OK
from trainwright.tools.doctor.profile import _with_calls as with_calls
from trainwright.tools.doctor.profile import profile_of, to_yaml
from trainwright.tools.doctor.ranks import RankResult, StoreBoard, examine
from trainwright.tools.doctor.report import judge


def examine_rank(local_size: int, figures: bool = False) -> list[str]:
    """Return the results of all ranks as this rank reads them."""
    measure._BUDGET, measure._MOST_ROWS = 0.0, 256
    measure._COPIED["cpu"] = 2**20
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    examine(store, rank, size, local_size, torch.device("cpu"), figures)
    board = StoreBoard(store)
    found = board.results(size, 60.0)
    # torch counts groups whose creation failed; pooled ranks would name their next group differently.
    dist.distributed_c10d._world.group_count = 0
    # Rank 0 hosts the store, so it ends last.
    board.put(f"done/{rank}", "")
    if rank == 0:
        for other in range(size):
            board.get(f"done/{other}", 60.0)
    return [json.dumps(asdict(each)) for each in found]


def examine_all(ranks, size: int, *arguments: object) -> list[RankResult]:
    found = ranks(examine_rank, size, *arguments, init_group=False, timeout=150.0)
    assert all(each == found[0] for each in found)
    return [rebuilt(RankResult, json.loads(text)) for text in found[0]]


def test_pairs_of_three_ranks(ranks):
    results = examine_all(ranks, 3, 3)
    assert [result.failure for result in results] == [None] * 3
    directions = {(pair.source, pair.target) for result in results for pair in result.pairs}
    assert directions == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert all(pair.latency > 0 and pair.bandwidth > 0 for result in results for pair in result.pairs)
    assert [result.rounds for result in results] == [(3, 3)] * 3
    # All ranks share one clock.
    assert results[0].offset is None
    assert all(abs(result.offset.seconds) <= result.offset.uncertain + 1e-3 for result in results[1:])
    assert [(link.axis, link.ranks) for link in results[0].links] == [("all", 3)]


def test_wrong_interface(ranks, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    results = examine_all(ranks, 2, 2)
    assert all(result.failure is not None for result in results)
    findings = judge(Examination({}, results, False, 2))
    [failed] = [finding for finding in findings if finding.check == "ranks" and finding.state != OK]
    assert "2 of 2 ranks failed" in failed.found


def test_silent_rank_is_named_with_its_activity():
    board = StoreBoard(dist.HashStore())
    board.at(0, "computing on cpu")
    failures = [result.failure for result in board.results(2, 0.05)]
    assert failures == [f"did not answer; it was {what}" for what in ("computing on cpu", "not started")]


def test_profile(ranks, tmp_path: Path):
    # The layout of two machines with two ranks each.
    results = examine_all(ranks, 4, 2, True)
    assert [result.failure for result in results] == [None] * 4
    assert [link.axis for link in results[0].links] == ["all", "within", "across"]
    values, notes = profile_of(Examination({}, results, False, 2), "lab")
    read = yaml.safe_load(to_yaml(values, notes))
    assert read == values
    assert read["name"] == "lab_cpu"
    assert read["devices_per_node"] == 2
    numbers = [*read["flops"].values(), read["memory_bandwidth"], read["host_bandwidth"], read["memory_bytes"]]
    numbers += [read["within"]["bandwidth"], read["across"]["bandwidth"], read["host_memory_bytes"]]
    assert all(isinstance(number, (int, float)) and number > 0 for number in numbers)
    assert set(read["flops"]) == {"float32", "tf32", "bfloat16", "float16"}
    assert 0 < read["efficiency"] <= 1
    assert 1e-8 < read["operation_seconds"] < 0.1
    assert read["measured_on"].endswith("CPU cores")
    assert read["within"] != read["across"]
    assert len(notes) == 1, "everything was measured"


def test_cost_of_a_call_is_separated_from_that_of_a_message():
    """All-reduces of two and of eight ranks that take 10 us a call and 3 us a message."""
    of_pair, of_all = (MeasuredLink(name, n, (10e-6 + 2 * (n - 1) * 3e-6) / (2 * (n - 1)), 1e9) for name, n in
                       (("pair", 2), ("all", 8)))  # fmt: skip
    assert with_calls(of_all, of_pair) == {"latency": 3e-6, "bandwidth": 1e9, "call": 10e-6}
    assert with_calls(of_all, None) == {"latency": pytest.approx(of_all.latency, rel=1e-3), "bandwidth": 1e9}
    # Noise: two ranks take longer than eight.
    slow = MeasuredLink("pair", 2, of_all.latency * 20, 1e9)
    noisy = with_calls(of_all, slow)
    assert noisy["latency"] == 0
    assert noisy["call"] == pytest.approx(14 * of_all.latency, rel=1e-3)


def test_profile_notes_what_was_not_measured(ranks):
    values, notes = profile_of(Examination({}, examine_all(ranks, 1, 1, True), False, 1), "lab")
    assert values["within"] == values["across"]
    assert [note.split(":")[0] for note in notes[1:]] == ["within", "across"]


def test_rounds_are_limited_for_many_ranks():
    rounds = of_ranks.rounds_of_pairs(1000)
    assert len(rounds) == of_ranks._MOST_ROUNDS
    assert len({pair for pairs in rounds for pair in pairs}) == 64 * 500


def test_doctor_command(tmp_path: Path):
    before = set(tmp_path.iterdir())
    done = run_command("doctor", "devices=2", "--json", stderr=subprocess.PIPE)
    document = json.loads(done.stdout)
    assert done.returncode == (1 if document["counts"]["error"] else 0), done.stderr
    found = {finding["check"]: finding for finding in document["findings"]}
    # Checks of ranks succeed on any machine.
    assert document["ranks"] == 2
    assert {"pairs within a machine", "all-reduce all", "clock"} <= found.keys(), done.stdout
    assert "ranks" not in found
    assert {finding["area"] for finding in document["findings"]} >= {"machine", "network", "folders"}
    assert [each["torch_version"] for each in document["environment"].values()] == [torch.__version__]
    assert set(tmp_path.iterdir()) == before, "files were left"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["doctor", "devices=0"], "devices=0: not a whole number of at least 1"),
        (["doctor", "device=2"], "did you mean devices?"),
        (["doctor", "accelerator=tpu"], "accelerators: auto, cpu, gpu"),
        (["doctor", "--jsn"], "did you mean --json?"),
        (["doctor", "--overwrite"], "--overwrite: there is no such option"),
        (["profile", "workers=2"], "no such key of profile"),
        (["profile", "--out"], "--out: expected one argument; `trainwright profile --help`"),
        (["profile", "--out", "mine.yaml"], "conf/device/mine.yaml"),
        (["profile", "--out=there/device/mine.yaml"], "--overwrite"),
        (["fit", "doctor"], "doctor"),
        (["-m", "doctor"], "doctor comes first: type trainwright doctor [key=value ...]"),
    ],
)
def test_refused(words, problem, tmp_path: Path, capsys):
    (tmp_path / "there/device").mkdir(parents=True)
    (tmp_path / "there/device/mine.yaml").touch()
    assert main(words) == 2
    assert problem in capsys.readouterr().err


def test_devices_under_a_launcher():
    launcher = Launcher("torchrun", 0, 4, 2)
    assert parse("doctor", ["devices=2"], launcher).request.devices == 2
    with pytest.raises(ConfigError, match="torchrun has started 2 ranks"):
        parse("doctor", ["devices=4"], launcher)


@pytest.mark.parametrize("verb", ["doctor", "profile"])
def test_help(verb, capsys):
    assert main([verb, "--help"]) == 0
    assert f"usage: trainwright {verb}" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert f"  {verb}" in capsys.readouterr().out
