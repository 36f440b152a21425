"""Findings of machines with problems: each finding is provoked by facts."""

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainwright.core.processes.machine import MachineFacts, cpu_quota
from trainwright.strategies.contract.communication.advice import MeasuredLink
from trainwright.tools.doctor.clocks import Offset, judge_clocks
from trainwright.tools.doctor.collect import HostReport, import_torch, report_host, within
from trainwright.tools.doctor.environment import (
    DeviceFacts,
    environment,
    environment_lines,
    installed_versions,
    judge_devices,
    judge_libraries,
    judge_same,
)
from trainwright.tools.doctor.examination import Examination
from trainwright.tools.doctor.finding import ERROR, OK, WARNING, Finding, ok, warning
from trainwright.tools.doctor.folders import judge_run_dir, judge_shared_memory
from trainwright.tools.doctor.machine import Demand, judge_machine
from trainwright.tools.doctor.network import (
    Interface,
    NetworkFacts,
    Pair,
    judge_failures,
    judge_network,
    judge_pairs,
    judge_rendezvous,
    network_facts,
)
from trainwright.tools.doctor.ranks import RankResult, rounds_of_pairs
from trainwright.tools.doctor.report import judge, to_json, to_text

GIB = 2**30


def only(findings: Sequence[Finding], check: str) -> Finding:
    """The one finding of a check that is not ok, or the one that is; it always says what to do."""
    of_check = [finding for finding in findings if finding.check == check]
    bad = [finding for finding in of_check if finding.state != OK]
    for finding in bad:
        assert finding.found, finding
        assert finding.wanted, finding
        assert finding.todo, finding
    assert len(bad or of_check) == 1, f"{check}: {findings}"
    return (bad or of_check)[0]


def states(findings: Sequence[Finding]) -> set[str]:
    return {finding.state for finding in findings}


MACHINE = MachineFacts(cores=8, quota=None, memory=64 * GIB, available=60 * GIB)


@pytest.mark.parametrize(("facts", "demand", "check", "state", "todo"), [
    ({}, Demand(4, threads=2), "cores", OK, ""),
    ({"quota": 2.0}, Demand(4), "cores", WARNING, "devices=2"),
    ({}, Demand(4, threads=8), "cores", WARNING, "launch.threads=2"),
    ({}, Demand(4, workers=16), "cores", WARNING, "num_workers=4"),
    ({"available": 3 * GIB}, Demand(4), "memory", WARNING, "docker run --memory"),
    ({"available": GIB, "memory_limit": GIB}, Demand(4), "memory", ERROR, "docker run --memory"),
])  # fmt: skip
def test_machine(facts, demand, check, state, todo):
    found = only(judge_machine(replace(MACHINE, **facts), demand), check)
    assert found.state == state
    assert todo in found.todo


def test_quota_of_both_versions_of_control_groups(tmp_path: Path):
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("250000\n")
    assert cpu_quota(tmp_path) == 2.5
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5


def test_what_does_not_answer_has_an_end():
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        within(0.05, lambda: threading.Event().wait(0.5))
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 / 0)


GPUS = DeviceFacts(files=2, usable=2, built_for="12.8")
TWO = Demand(2, on_gpu=True)


@pytest.mark.parametrize(("facts", "demand", "accelerator", "check", "state", "found"), [
    (GPUS, TWO, "auto", "GPUs", OK, "2 of 2 GPUs that torch can use"),
    (DeviceFacts(), Demand(2), "auto", "accelerator", OK, "CPU"),
    (replace(GPUS, usable=0), TWO, "cpu", "accelerator", OK, "CPU"),
    (DeviceFacts(), Demand(1), "gpu", "GPUs", ERROR, "there is no GPU"),
    (GPUS, Demand(4, on_gpu=True), "auto", "GPUs", ERROR, "for 4 ranks"),
    (replace(GPUS, usable=1, visible="0,5"), TWO, "auto", "GPUs", ERROR, "CUDA_VISIBLE_DEVICES=0,5"),
    (replace(GPUS, usable=0, built_for=""), TWO, "auto", "GPUs", ERROR, "built without CUDA"),
    (replace(GPUS, usable=0, visible=""), TWO, "auto", "GPUs", ERROR, "hides all GPUs"),
    (replace(GPUS, usable=0, torch_says="The driver is too old"), TWO, "auto", "GPUs", ERROR, "driver is too old"),
])  # fmt: skip
def test_devices(facts, demand, accelerator, check, state, found):
    finding = only([judge_devices(facts, demand, accelerator)], check)
    assert finding.state == state
    assert found in finding.found


INSTALLED = {"torch": "2.13.0+cpu", "lightning": "2.6.6", "numpy": "2.4.6"}


@pytest.mark.parametrize(("name", "version"), [("lightning", "2.6.2"), ("pytorch-lightning", "2.6.3")])
def test_malicious_releases_are_found(name: str, version: str):
    [found] = judge_libraries({**INSTALLED, name: version})
    assert (found.check, found.state) == ("compromised release", ERROR)
    assert "every password" in found.todo


def test_this_environment_is_allowed():
    assert judge_libraries(installed_versions()) == []


def test_the_environment_is_that_of_torch():
    fields = environment()
    assert fields["torch_version"] == torch.__version__
    lines = environment_lines({**fields, "cuda_runtime_version": None, "cpu_info": "Model name:   Some CPU"})
    assert f"torch: {torch.__version__}" in lines
    assert "CPU: Some CPU" in lines
    assert not any(line.startswith("CUDA installed") for line in lines)


def test_versions_of_two_machines():
    found = only(judge_same({"a": {"NCCL": "2.27.5"}, "b": {"NCCL": "2.19.3"}}), "NCCL everywhere")
    assert found.state == ERROR
    assert "2.19.3 on b" in found.found
    assert states(judge_same({"a": INSTALLED, "b": INSTALLED})) == {OK}
    assert judge_same({"a": INSTALLED}) == []


ETH = Interface("eth0", True, False, "10.0.0.2", 12.5e9)
LOOPBACK = Interface("lo", True, True, "127.0.0.1")
DOCKER = Interface("docker0", True, False, "172.17.0.1")
DOWN = Interface("ib0", False)
NETWORK = NetworkFacts("node1", ["10.0.0.2"], [LOOPBACK, ETH, DOCKER, DOWN], {}, [])


@pytest.mark.parametrize(("variables", "hosts", "check", "state", "found"), [
    ({"GLOO_SOCKET_IFNAME": "eth0"}, 2, "GLOO_SOCKET_IFNAME", OK, "10.0.0.2"),
    ({"GLOO_SOCKET_IFNAME": "eth9"}, 1, "GLOO_SOCKET_IFNAME", ERROR, "there is no interface eth9"),
    ({"GLOO_SOCKET_IFNAME": "lo"}, 1, "GLOO_SOCKET_IFNAME", OK, "lo"),
    ({"GLOO_SOCKET_IFNAME": "lo"}, 2, "GLOO_SOCKET_IFNAME", ERROR, "this machine alone"),
    ({"GLOO_SOCKET_IFNAME": "docker0"}, 2, "GLOO_SOCKET_IFNAME", ERROR, "bridge of containers"),
    ({"GLOO_SOCKET_IFNAME": "docker0"}, 1, "GLOO_SOCKET_IFNAME", WARNING, "bridge of containers"),
    ({"GLOO_SOCKET_IFNAME": "ib0"}, 1, "GLOO_SOCKET_IFNAME", ERROR, "is down"),
    ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, 1, "GLOO_SOCKET_IFNAME", ERROR, "ib0 is down"),
    ({"NCCL_SOCKET_IFNAME": "eth"}, 2, "NCCL_SOCKET_IFNAME", OK, "eth0"),
    ({"NCCL_SOCKET_IFNAME": "=eth"}, 2, "NCCL_SOCKET_IFNAME", ERROR, "there is no interface"),
    ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, 2, "NCCL_SOCKET_IFNAME", OK, "eth0"),
    ({"NCCL_SOCKET_IFNAME": "^eth,docker"}, 2, "NCCL_SOCKET_IFNAME", ERROR, "this machine alone"),
    ({"NCCL_SOCKET_IFNAME": "docker"}, 2, "NCCL_SOCKET_IFNAME", ERROR, "bridge"),
])  # fmt: skip
def test_interfaces_that_variables_choose(variables, hosts, check, state, found):
    finding = only(judge_network(replace(NETWORK, variables=variables), hosts), check)
    assert finding.state == state
    assert found in finding.found
    assert state == OK or f"export {check}=eth0" in finding.todo


@pytest.mark.parametrize(("facts", "hosts", "check", "state", "todo"), [
    ({"addresses": ["127.0.1.1"]}, 1, "host name", OK, ""),
    ({"addresses": ["127.0.1.1"]}, 2, "host name", ERROR, "'10.0.0.2 node1' to /etc/hosts"),
    ({"addresses": []}, 2, "host name", ERROR, "/etc/hosts"),
    ({"addresses": ["127.0.1.1"], "variables": {"GLOO_SOCKET_IFNAME": "eth0"}}, 2, "host name", OK, ""),
    ({"addresses": ["172.17.0.1"]}, 2, "GLOO_SOCKET_IFNAME", WARNING, "export GLOO_SOCKET_IFNAME=eth0"),
    ({"variables": {"MASTER_ADDR": "localhost"}, "master": ["127.0.0.1", "::1"]}, 2, "MASTER_ADDR", ERROR, "rdzv"),
    ({"variables": {"MASTER_ADDR": "nowhere"}, "master": []}, 2, "MASTER_ADDR", ERROR, "rdzv"),
    ({"variables": {"MASTER_ADDR": "node0"}, "master": ["10.0.0.1"]}, 2, "MASTER_ADDR", OK, ""),
])  # fmt: skip
def test_names(facts, hosts, check, state, todo):
    found = only(judge_network(replace(NETWORK, **facts), hosts), check)
    assert found.state == state
    assert todo in found.todo


def test_nccl_is_told_which_of_several_interfaces():
    several = replace(NETWORK, interfaces=[LOOPBACK, ETH, Interface("eth1", True, False, "10.1.0.2")])
    assert only(judge_network(several, 2, on_gpu=True), "NCCL_SOCKET_IFNAME").state == WARNING
    assert states(judge_network(several, 2, on_gpu=False)) == {OK}


def test_this_machine_has_a_loopback_interface():
    assert any(each.loopback and each.up and each.address == "127.0.0.1" for each in network_facts().interfaces)


def pairs_of(ranks: int, slow_rank: int | None = None) -> list[Pair]:
    return [
        Pair(a, b, 5e-3 if slow_rank in (a, b) else 2e-5, 1e8 if slow_rank in (a, b) else 1e9)
        for a in range(ranks)
        for b in range(ranks)
        if a != b
    ]


def test_a_slow_rank_is_named():
    hosts = ["node1"] * 5
    found = only(judge_pairs(pairs_of(5, slow_rank=3), hosts), "slow pairs within a machine")
    assert found.state == WARNING
    assert "rank 3" in found.found
    assert states(judge_pairs(pairs_of(5), hosts)) == {OK}


def test_a_slow_pair_is_named():
    pairs = [replace(p, bandwidth=1e7) if (p.source, p.target) == (1, 2) else p for p in pairs_of(4)]
    assert "1-2" in only(judge_pairs(pairs, ["node1"] * 4), "slow pairs within a machine").found


def test_two_ranks_are_not_compared_with_themselves():
    assert states(judge_pairs([Pair(0, 1, 1e-5, 1e9), Pair(1, 0, 1e-5, 1e8)], ["a", "a"])) == {OK}


def test_a_slow_network():
    hosts = ["a", "b"]
    slow = [Pair(0, 1, 1e-4, 5e7), Pair(1, 0, 1e-4, 5e7)]
    assert only(judge_pairs(slow, hosts), "bandwidth across machines").state == WARNING
    fast = [replace(pair, bandwidth=1e9) for pair in slow]
    assert states(judge_pairs(fast, hosts)) == {OK}
    found = only(judge_pairs(fast, hosts, {"a": 12.5e9, "b": 12.5e9}), "bandwidth across machines")
    assert "12.50 GB/s" in found.found


def test_ranks_that_do_not_answer():
    found = only(judge_failures({2: "did not answer; it was connecting to the others"}, 4), "ranks")
    assert found.state == ERROR
    assert "rank 2" in found.found
    assert "rank 1 did not reach the rendezvous: timeout" in only([judge_rendezvous(1, "timeout")], "rendezvous").found


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_every_pair_meets_once_and_nobody_twice_in_a_round(ranks):
    rounds = rounds_of_pairs(ranks)
    together = [pair for pairs in rounds for pair in pairs]
    assert sorted(together) == [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    for pairs in rounds:
        taking_part = [rank for pair in pairs for rank in pair]
        assert len(taking_part) == len(set(taking_part))


def test_clocks():
    hosts = ["a", "a", "b", "b"]
    assert states(judge_clocks([Offset(1, 1e-5, 1e-5), Offset(2, 0.06, 0.02)], hosts)) == {OK}
    late = only(judge_clocks([Offset(1, 0.0, 1e-5), Offset(2, -0.5, 1e-3), Offset(3, -0.4, 1e-3)], hosts), "clock")
    assert late.state == WARNING
    assert "clock of b is 500.0 ms behind that of a" in late.found
    assert only(judge_clocks([Offset(2, 3600.0, 1e-3)], hosts), "clock").state == ERROR


@pytest.mark.parametrize(("free", "state"), [(100 * GIB, OK), (5 * GIB, WARNING), (GIB // 2, ERROR), (None, OK)])
def test_disks(monkeypatch, tmp_path: Path, free: int | None, state: str):
    monkeypatch.setattr("trainwright.tools.doctor.folders.free_bytes", lambda path: free)
    assert only([judge_run_dir(str(tmp_path / "a" / "b"))], "run directory").state == state
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path: Path):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    found = only([judge_run_dir(str(tmp_path / "a"))], "run directory")
    assert found.state == ERROR
    assert f"not allowed to write in {tmp_path}" in found.found


def test_what_cannot_be_imported_is_an_error(monkeypatch):
    def broken() -> None:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    assert import_torch() == []
    monkeypatch.setattr("trainwright.tools.doctor.collect._import_everything", broken)
    [found] = import_torch()
    assert found.state == ERROR
    assert "libcudart.so.12" in found.found


def test_shared_memory():
    docker = 64 * 2**20, 64 * 2**20
    assert judge_shared_memory(*docker, Demand(2)).state == OK
    found = only([judge_shared_memory(*docker, Demand(2, workers=4))], "shared memory")
    assert found.state == ERROR
    assert "--shm-size=2g" in found.todo
    assert judge_shared_memory(*docker, Demand(2, on_gpu=True)).state == WARNING


CORES = ok("machine", "cores", "8 cores")
FULL = warning("folders", "run directory", "1 GiB free", "10 GiB", "free some")


def examination(*hosts: HostReport, failures: dict[int, str] | None = None) -> Examination:
    results = [
        RankResult(2 * index + local, each.host, (failures or {}).get(2 * index + local))
        for index, each in enumerate(hosts)
        for local in range(2)
    ]
    return Examination({each.host: each for each in hosts}, results, True, 2)


def test_reports_and_results_travel_whole():
    sent = HostReport("node1", [CORES, FULL], {"torch": "2.13.0"}, 1e9, {"os": "Linux"})
    assert HostReport.from_json(sent.to_json()) == sent
    result = RankResult(
        1, "b", None, Offset(1, 0.5, 0.1), [Pair(1, 0, 1e-5, 1e9)], (1, 1), [MeasuredLink("all", 2, 1e-5, 1e9)]
    )
    assert RankResult.from_json(result.to_json()) == result


def test_what_is_true_of_all_machines_is_said_once():
    findings = judge(examination(HostReport("node1", [CORES]), HostReport("node2", [CORES, FULL])))
    where = {finding.check: finding.where for finding in findings}
    assert (where["cores"], where["run directory"]) == ("", "node2")


def test_what_does_not_answer_is_an_error(monkeypatch, tmp_path: Path):
    def silent() -> NetworkFacts:
        raise TimeoutError("no answer within 20 s")

    monkeypatch.setattr("trainwright.tools.doctor.network.network_facts", silent)
    report = report_host("node1", str(tmp_path), Demand(1))
    found = only(report.findings, "network answers")
    assert (found.state, found.area) == (ERROR, "network")
    assert {"cores", "run directory", "shared memory"} <= {finding.check for finding in report.findings}


def test_a_machine_that_has_not_reported():
    view = examination(HostReport("node1"), HostReport("node2"))
    assert "node2" in only(judge(replace(view, hosts={"node1": HostReport("node1")})), "facts").found


def test_report_in_both_forms():
    report = HostReport("node1", [CORES, FULL], environment={"torch_version": "2.13.0"})
    view = examination(report, failures={1: "did not answer; it was connecting to the others"})
    findings = judge(view)
    document = json.loads(to_json(findings, view))
    assert document["hosts"] == ["node1"]
    assert document["environment"]["node1"] == {"torch_version": "2.13.0"}
    assert document["counts"] == {OK: 1, WARNING: 1, ERROR: 1}
    text = to_text(findings, view)
    assert "  torch: 2.13.0" in text
    assert "ERROR    ranks: 1 of 2 ranks failed: rank 1: did not answer" in text
    assert "do:     free some" in text
    assert "1 errors, 1 warnings, 1 ok" in text
