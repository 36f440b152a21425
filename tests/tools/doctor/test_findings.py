"""Findings of machines with problems; facts provoke each of them."""

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainwright.core.processes.machine import MachineFacts, cpu_quota
from trainwright.core.text.plain import rebuilt
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
from trainwright.tools.doctor.ranks import RankResult, StoreBoard, rounds_of_pairs
from trainwright.tools.doctor.report import judge, to_json, to_text

GIB, DOCKER_MEMORY = 2**30, (64 * 2**20, 64 * 2**20)
MACHINE = MachineFacts(cores=8, quota=None, memory=64 * GIB, available=60 * GIB)
GPUS, TWO = DeviceFacts(files=2, usable=2, built_for="12.8"), Demand(2, on_gpu=True)
INSTALLED = {"torch": "2.13.0+cpu", "lightning": "2.6.6", "numpy": "2.4.6"}
ETH = Interface("eth0", True, False, "10.0.0.2", 12.5e9)
LOOPBACK = Interface("lo", True, True, "127.0.0.1")
DOCKER = Interface("docker0", True, False, "172.17.0.1")
NETWORK = NetworkFacts("node1", ["10.0.0.2"], [LOOPBACK, ETH, DOCKER, Interface("ib0", False)], {}, [])
SEVERAL = replace(NETWORK, interfaces=[LOOPBACK, ETH, Interface("eth1", True, False, "10.1.0.2")])


def only(findings: Sequence[Finding], check: str) -> Finding:
    """Return the one finding of a check, preferably a problem, which always has a remedy."""
    of_check = [finding for finding in findings if finding.check == check]
    bad = [finding for finding in of_check if finding.state != OK]
    for finding in bad:
        assert finding.found, finding
        assert finding.wanted, finding
        assert finding.todo, finding
    assert len(bad or of_check) == 1, f"{check}: {findings}"
    return (bad or of_check)[0]


def machine(demand: Demand, **facts: Any) -> list[Finding]:
    return judge_machine(replace(MACHINE, **facts), demand)


def devices(facts: DeviceFacts, demand: Demand = TWO, accelerator: str = "auto") -> list[Finding]:
    return [judge_devices(facts, demand, accelerator)]


def network(hosts: int, **facts: Any) -> list[Finding]:
    return judge_network(replace(NETWORK, **facts), hosts)


def pairs_of(ranks: int, slow_rank: int | None = None) -> list[Pair]:
    slow = {True: (5e-3, 1e8), False: (2e-5, 1e9)}
    return [Pair(a, b, *slow[slow_rank in (a, b)]) for a in range(ranks) for b in range(ranks) if a != b]


SLOW_PAIR = [replace(p, bandwidth=1e7) if (p.source, p.target) == (1, 2) else p for p in pairs_of(4)]
ACROSS = [Pair(0, 1, 1e-4, 1e9), Pair(1, 0, 1e-4, 1e9)]
SLOW_LINK = [replace(pair, bandwidth=5e7) for pair in ACROSS]
BETWEEN = ["a", "a", "b", "b"]


@pytest.mark.parametrize(("findings", "check", "state", "text"), [
    (machine(Demand(4, threads=2)), "cores", OK, ""),
    (machine(Demand(4), quota=2.0), "cores", WARNING, "devices=2"),
    (machine(Demand(4, threads=8)), "cores", WARNING, "launch.threads=2"),
    (machine(Demand(4, workers=16)), "cores", WARNING, "num_workers=4"),
    (machine(Demand(4), available=3 * GIB), "memory", WARNING, "docker run --memory"),
    (machine(Demand(4), available=GIB, memory_limit=GIB), "memory", ERROR, "docker run --memory"),
    (devices(GPUS), "GPUs", OK, "2 of 2 GPUs that torch can use"),
    (devices(DeviceFacts(), Demand(2)), "accelerator", OK, "CPU"),
    (devices(replace(GPUS, usable=0), TWO, "cpu"), "accelerator", OK, "CPU"),
    (devices(DeviceFacts(), Demand(1), "gpu"), "GPUs", ERROR, "there is no GPU"),
    (devices(GPUS, Demand(4, on_gpu=True)), "GPUs", ERROR, "for 4 ranks"),
    (devices(replace(GPUS, usable=1, visible="0,5")), "GPUs", ERROR, "CUDA_VISIBLE_DEVICES=0,5"),
    (devices(replace(GPUS, usable=0, built_for="")), "GPUs", ERROR, "built without CUDA"),
    (devices(replace(GPUS, usable=0, visible="")), "GPUs", ERROR, "hides all GPUs"),
    (devices(replace(GPUS, usable=0, torch_says="The driver is too old")), "GPUs", ERROR, "driver is too old"),
    (judge_libraries({**INSTALLED, "lightning": "2.6.2"}), "compromised release", ERROR, "every password"),
    (judge_libraries({**INSTALLED, "pytorch-lightning": "2.6.3"}), "compromised release", ERROR, "every password"),
    (judge_same({"a": {"NCCL": "2.27.5"}, "b": {"NCCL": "2.19.3"}}), "NCCL everywhere", ERROR, "2.19.3 on b"),
    (network(1, addresses=["127.0.1.1"]), "host name", OK, ""),
    (network(2, addresses=["127.0.1.1"]), "host name", ERROR, "'10.0.0.2 node1' to /etc/hosts"),
    (network(2, addresses=[]), "host name", ERROR, "/etc/hosts"),
    (network(2, addresses=["127.0.1.1"], variables={"GLOO_SOCKET_IFNAME": "eth0"}), "host name", OK, ""),
    (network(2, addresses=["172.17.0.1"]), "GLOO_SOCKET_IFNAME", WARNING, "export GLOO_SOCKET_IFNAME=eth0"),
    (network(2, variables={"MASTER_ADDR": "localhost"}, master=["127.0.0.1", "::1"]), "MASTER_ADDR", ERROR, "rdzv"),
    (network(2, variables={"MASTER_ADDR": "nowhere"}), "MASTER_ADDR", ERROR, "rdzv"),
    (network(2, variables={"MASTER_ADDR": "node0"}, master=["10.0.0.1"]), "MASTER_ADDR", OK, ""),
    (judge_network(SEVERAL, 2, on_gpu=True), "NCCL_SOCKET_IFNAME", WARNING, "eth1"),
    (judge_pairs(pairs_of(5, slow_rank=3), ["node1"] * 5), "slow pairs within a machine", WARNING, "rank 3"),
    (judge_pairs(SLOW_PAIR, ["node1"] * 4), "slow pairs within a machine", WARNING, "1-2"),
    (judge_pairs(SLOW_LINK, ["a", "b"]), "bandwidth across machines", WARNING, ""),
    (judge_pairs(ACROSS, ["a", "b"], {"a": 12.5e9, "b": 12.5e9}), "bandwidth across machines", WARNING, "12.50 GB/s"),
    (judge_failures({2: "did not answer; it was connecting to the others"}, 4), "ranks", ERROR, "rank 2"),
    ([judge_rendezvous(1, "timeout")], "rendezvous", ERROR, "rank 1 did not reach the rendezvous: timeout"),
    (judge_clocks([Offset(1, 0.0, 1e-5), Offset(2, -0.5, 1e-3), Offset(3, -0.4, 1e-3)], BETWEEN), "clock", WARNING,
     "clock of b is 500.0 ms behind that of a"),
    (judge_clocks([Offset(2, 3600.0, 1e-3)], BETWEEN), "clock", ERROR, "ahead of"),
    ([judge_shared_memory(*DOCKER_MEMORY, Demand(2))], "shared memory", OK, ""),
    ([judge_shared_memory(*DOCKER_MEMORY, Demand(2, workers=4))], "shared memory", ERROR, "--shm-size=2g"),
    ([judge_shared_memory(*DOCKER_MEMORY, TWO)], "shared memory", WARNING, "--shm-size"),
])  # fmt: skip
def test_finding(findings: list[Finding], check: str, state: str, text: str) -> None:
    finding = only(findings, check)
    assert finding.state == state
    assert text in f"{finding.found} {finding.todo}"


@pytest.mark.parametrize("findings", [
    judge_same({"a": INSTALLED, "b": INSTALLED}),
    judge_network(SEVERAL, 2, on_gpu=False),
    judge_pairs(pairs_of(5), ["node1"] * 5),
    judge_pairs([Pair(0, 1, 1e-5, 1e9), Pair(1, 0, 1e-5, 1e8)], ["a", "a"]),
    judge_pairs(ACROSS, ["a", "b"]),
    judge_clocks([Offset(1, 1e-5, 1e-5), Offset(2, 0.06, 0.02)], BETWEEN),
])  # fmt: skip
def test_no_problem(findings: list[Finding]) -> None:
    assert {finding.state for finding in findings} == {OK}


@pytest.mark.parametrize(("library", "value", "hosts", "state", "found"), [
    ("GLOO", "eth0", 2, OK, "10.0.0.2"),
    ("GLOO", "eth9", 1, ERROR, "there is no interface eth9"),
    ("GLOO", "lo", 1, OK, "lo"),
    ("GLOO", "lo", 2, ERROR, "this machine alone"),
    ("GLOO", "docker0", 2, ERROR, "bridge of containers"),
    ("GLOO", "docker0", 1, WARNING, "bridge of containers"),
    ("GLOO", "ib0", 1, ERROR, "is down"),
    ("GLOO", "eth0,ib0", 1, ERROR, "ib0 is down"),
    ("NCCL", "eth", 2, OK, "eth0"),
    ("NCCL", "=eth", 2, ERROR, "there is no interface"),
    ("NCCL", "^docker,lo", 2, OK, "eth0"),
    ("NCCL", "^eth,docker", 2, ERROR, "this machine alone"),
    ("NCCL", "docker", 2, ERROR, "bridge"),
])  # fmt: skip
def test_interface_variables(library: str, value: str, hosts: int, state: str, found: str) -> None:
    variable = f"{library}_SOCKET_IFNAME"
    finding = only(network(hosts, variables={variable: value}), variable)
    assert finding.state == state
    assert found in finding.found
    assert state == OK or f"export {variable}=eth0" in finding.todo


def test_this_machine() -> None:
    assert judge_libraries(installed_versions()) == []
    assert judge_same({"a": INSTALLED}) == []
    assert import_torch() == []
    assert any(each.loopback and each.up and each.address == "127.0.0.1" for each in network_facts().interfaces)
    fields = environment()
    assert fields["torch_version"] == torch.__version__
    lines = environment_lines({**fields, "cuda_runtime_version": None, "cpu_info": "Model name:   Some CPU"})
    assert {f"torch: {torch.__version__}", "CPU: Some CPU"} <= set(lines)
    assert not any(line.startswith("CUDA installed") for line in lines)


def test_cpu_quota_of_both_cgroup_versions(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("250000\n")
    assert cpu_quota(tmp_path) == 2.5
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_rounds_have_each_pair_once_and_each_rank_at_most_once(ranks: int) -> None:
    rounds = rounds_of_pairs(ranks)
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    for each in rounds:
        members = [rank for pair in each for rank in pair]
        assert len(members) == len(set(members))


@pytest.mark.parametrize(("free", "state"), [(100 * GIB, OK), (5 * GIB, WARNING), (GIB // 2, ERROR), (None, OK)])
def test_disk_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int | None, state: str) -> None:
    monkeypatch.setattr("trainwright.tools.doctor.folders.free_bytes", lambda path: free)
    assert only([judge_run_dir(str(tmp_path / "a" / "b"))], "run directory").state == state
    assert list(tmp_path.iterdir()) == []


def test_folder_without_write_permission(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    found = only([judge_run_dir(str(tmp_path / "a"))], "run directory")
    assert found.state == ERROR
    assert f"not allowed to write in {tmp_path}" in found.found


def test_import_error_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr("trainwright.tools.doctor.collect._import_everything", broken)
    [found] = import_torch()
    assert found.state == ERROR
    assert "libcudart.so.12" in found.found


def test_time_limit_of_a_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        within(0.05, lambda: threading.Event().wait(0.5))
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 / 0)

    def timeout() -> NetworkFacts:
        raise TimeoutError("no answer within 20 s")

    monkeypatch.setattr("trainwright.tools.doctor.network.network_facts", timeout)
    report = report_host("node1", str(tmp_path), Demand(1))
    found = only(report.findings, "network answers")
    assert (found.state, found.area) == (ERROR, "network")
    assert {"cores", "run directory", "shared memory"} <= {finding.check for finding in report.findings}


CORES = ok("machine", "cores", "8 cores")
FULL = warning("folders", "run directory", "1 GiB free", "10 GiB", "free some")


def examination(*hosts: HostReport, failures: dict[int, str] | None = None) -> Examination:
    results = [
        RankResult(2 * index + local, each.host, (failures or {}).get(2 * index + local))
        for index, each in enumerate(hosts)
        for local in range(2)
    ]
    return Examination({each.host: each for each in hosts}, results, True, 2)


def test_reports_and_results_survive_the_store() -> None:
    sent = HostReport("node1", [CORES, FULL], {"torch": "2.13.0"}, 1e9, {"os": "Linux"})
    board = StoreBoard(dist.HashStore())
    board.put("facts/node1", asdict(sent))
    assert rebuilt(HostReport, board.get("facts/node1", 1.0)) == sent
    pairs, links = [Pair(1, 0, 1e-5, 1e9)], [MeasuredLink("all", 2, 1e-5, 1e9)]
    result = RankResult(1, "b", None, Offset(1, 0.5, 0.1), pairs, (1, 1), links)
    board.put("0/result", asdict(result))
    assert board.results(1, 1.0) == [result]


def test_findings_of_several_machines_are_merged() -> None:
    view = examination(HostReport("node1", [CORES]), HostReport("node2", [CORES, FULL]))
    where = {finding.check: finding.where for finding in judge(view)}
    assert (where["cores"], where["run directory"]) == ("", "node2")
    assert "node2" in only(judge(replace(view, hosts={"node1": HostReport("node1")})), "facts").found


def test_report_as_text_and_json() -> None:
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
