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
from trainwright.tools.doctor.collect import HostReport, report_host, within
from trainwright.tools.doctor.environment import (
    DeviceFacts,
    Gpu,
    environment,
    environment_lines,
    installed_versions,
    judge_devices,
    judge_libraries,
    judge_same,
    parse_gpus,
)
from trainwright.tools.doctor.finding import ERROR, OK, WARNING, Finding, ok, warning
from trainwright.tools.doctor.folders import (
    FolderFacts,
    file_system,
    folder_facts,
    judge_run_dir,
    judge_shared_memory,
    judge_tmp,
)
from trainwright.tools.doctor.machine import Demand, judge_import, judge_machine
from trainwright.tools.doctor.network import (
    Interface,
    NetworkFacts,
    Pair,
    judge_meeting,
    judge_network,
    judge_not_met,
    judge_pairs,
    network_facts,
)
from trainwright.tools.doctor.ranks import RankResult, rounds_of_pairs
from trainwright.tools.doctor.report import judge, to_json, to_text
from trainwright.tools.doctor.together import Seen

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


def test_imports():
    assert judge_import(3.0, 60.0)[0].state == OK
    assert judge_import(45.0, 60.0)[0].state == WARNING
    late = judge_import(None, 60.0, "no answer within 60 s")[0]
    assert late.state == ERROR
    assert "no answer" in late.found


def test_what_does_not_answer_has_an_end():
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        within(0.05, lambda: threading.Event().wait(0.5))
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 / 0)


H100 = Gpu(0, "NVIDIA H100", 80 * GIB)
GPUS = DeviceFacts(gpus=[H100, replace(H100, index=1)], files=2, usable=2, built_for="12.8")
TWO = Demand(2, on_gpu=True)


@pytest.mark.parametrize(("facts", "demand", "accelerator", "check", "state", "found"), [
    (GPUS, TWO, "auto", "GPUs", OK, "2 of 2 GPUs that torch can use: NVIDIA H100"),
    (DeviceFacts(), Demand(2), "auto", "accelerator", OK, "CPU"),
    (replace(GPUS, usable=0), TWO, "cpu", "accelerator", OK, "CPU"),
    (DeviceFacts(), Demand(1), "gpu", "GPUs", ERROR, "there is no GPU"),
    (GPUS, Demand(4, on_gpu=True), "auto", "GPUs", ERROR, "for 4 ranks"),
    (replace(GPUS, usable=1, visible="0,5"), TWO, "auto", "GPUs", ERROR, "CUDA_VISIBLE_DEVICES=0,5"),
    (replace(GPUS, usable=0, built_for=""), TWO, "auto", "GPUs", ERROR, "built without CUDA"),
    (replace(GPUS, usable=0, visible=""), TWO, "auto", "GPUs", ERROR, "hides all GPUs"),
    (replace(GPUS, usable=0, torch_says="The driver is too old"), TWO, "auto", "GPUs", ERROR, "driver is too old"),
    (replace(GPUS, gpus=[H100, replace(H100, name="A100")]), TWO, "auto", "GPUs", WARNING, "A100"),
    (replace(GPUS, gpus=[replace(H100, uncorrected=3)]), TWO, "auto", "memory of GPUs", ERROR, "3 memory errors"),
    (replace(GPUS, gpus=[replace(H100, used=30 * GIB)]), TWO, "auto", "use of GPUs", WARNING, "30.0 GiB of 80.0"),
])  # fmt: skip
def test_devices(facts, demand, accelerator, check, state, found):
    finding = only(judge_devices(facts, demand, accelerator), check)
    assert finding.state == state
    assert found in finding.found


def test_lines_of_nvidia_smi():
    first, second = parse_gpus("0, NVIDIA H100 80GB HBM3, 81559, 4, 2\n1, NVIDIA L4, 23034, 1, [N/A]\n")
    assert (first.index, first.memory, first.used, first.uncorrected) == (0, 81559 * 2**20, 4 * 2**20, 2)
    assert (second.name, second.uncorrected) == ("NVIDIA L4", 0)


REQUIREMENTS = ["torch<2.14,>=2.11", "lightning<2.7,>=2.6.4", 'transformers<6,>=5.20; extra == "huggingface"']
INSTALLED = {"torch": "2.13.0+cpu", "lightning": "2.6.6", "numpy": "2.4.6"}


@pytest.mark.parametrize(("installed", "check", "state", "todo"), [
    ({}, "versions", OK, ""),
    ({"torch": None}, "torch", ERROR, "pip install 'torch<2.14,>=2.11'"),
    ({"torch": "2.4.0"}, "torch", ERROR, "pip install"),
    ({"transformers": "4.1"}, "transformers", WARNING, "pip install"),
    ({"lightning": "2.6.2"}, "compromised release", ERROR, "every password"),
    ({"pytorch-lightning": "2.6.3"}, "compromised release", ERROR, "every password"),
])  # fmt: skip
def test_libraries(installed, check, state, todo):
    merged = {name: version for name, version in {**INSTALLED, **installed}.items() if version is not None}
    found = only(judge_libraries(merged, REQUIREMENTS), check)
    assert found.state == state
    assert todo in found.todo


def test_this_environment_is_allowed():
    assert states(judge_libraries(installed_versions())) == {OK}


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
    ({"addresses": ["127.0.1.1"]}, 2, "host name", ERROR, "'10.0.0.2 node1' into /etc/hosts"),
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
    found = only(judge_meeting({2: "did not answer; it was meeting the others"}, 4), "ranks")
    assert found.state == ERROR
    assert "rank 2" in found.found
    assert "rank 1 has not met the others: timeout" in only([judge_not_met(1, "timeout")], "meeting").found


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


FOLDER = FolderFacts("runs", "/data", 100 * GIB, 0.5, "ext4")


@pytest.mark.parametrize(("judge", "facts", "check", "state"), [
    (judge_run_dir, {}, "run directory", OK),
    (judge_run_dir, {"free": 5 * GIB}, "run directory", WARNING),
    (judge_run_dir, {"free": GIB // 2}, "run directory", ERROR),
    (judge_run_dir, {"inodes": 0.001}, "run directory", WARNING),
    (judge_run_dir, {"problem": "Read-only file system"}, "run directory", ERROR),
    (judge_tmp, {"free": 2**20}, "temporary files", ERROR),
    (judge_tmp, {"kind": "nfs4"}, "temporary files on a network", WARNING),
])  # fmt: skip
def test_disks(judge, facts, check, state):
    judged = judge(replace(FOLDER, **facts))
    found = only(judged if isinstance(judged, list) else [judged], check)
    assert found.state == state
    assert str(facts.get("problem", "")) in found.found


def test_a_folder_that_is_not_there_yet(tmp_path: Path):
    facts = folder_facts(tmp_path / "a" / "b")
    assert facts.exists == str(tmp_path)
    assert facts.free > 0
    assert facts.problem is None
    assert list(tmp_path.iterdir()) == []


def test_file_system_of_a_folder():
    mounts = "dev / ext4 rw 0 0\nhome:/x /home nfs4 rw 0 0\ntmpfs /home/my\\040tmp tmpfs rw 0 0\n"
    kinds = [file_system(Path(path), mounts) for path in ("/var", "/home/me", "/home/my tmp/x", "/homes")]
    assert kinds == ["ext4", "nfs4", "tmpfs", "ext4"]


def test_shared_memory():
    docker = 64 * 2**20, 64 * 2**20
    assert judge_shared_memory(*docker, Demand(2)).state == OK
    found = only([judge_shared_memory(*docker, Demand(2, workers=4))], "shared memory")
    assert found.state == ERROR
    assert "--shm-size=2g" in found.todo
    assert judge_shared_memory(*docker, Demand(2, on_gpu=True)).state == WARNING


CORES = ok("machine", "cores", "8 cores")
FULL = warning("folders", "run directory", "1 GiB free", "10 GiB", "free some")


def seen(*hosts: HostReport, failures: dict[int, str] | None = None) -> Seen:
    results = [
        RankResult(2 * index + local, each.host, (failures or {}).get(2 * index + local))
        for index, each in enumerate(hosts)
        for local in range(2)
    ]
    return Seen({each.host: each for each in hosts}, results, True, 2)


def test_reports_and_results_travel_whole():
    sent = HostReport("node1", [CORES, FULL], {"torch": "2.13.0"}, 1e9, {"os": "Linux"})
    assert HostReport.from_json(sent.to_json()) == sent
    result = RankResult(
        1, "b", None, Offset(1, 0.5, 0.1), [Pair(1, 0, 1e-5, 1e9)], (1, 1), [MeasuredLink("all", 2, 1e-5, 1e9)]
    )
    assert RankResult.from_json(result.to_json()) == result


def test_what_is_true_of_all_machines_is_said_once():
    findings = judge(seen(HostReport("node1", [CORES]), HostReport("node2", [CORES, FULL])))
    where = {finding.check: finding.where for finding in findings}
    assert (where["cores"], where["run directory"]) == ("", "node2")


def test_what_does_not_answer_is_an_error(monkeypatch, tmp_path: Path):
    def silent() -> NetworkFacts:
        raise TimeoutError("no answer within 20 s")

    monkeypatch.setattr("trainwright.tools.doctor.network.network_facts", silent)
    report = report_host("node1", str(tmp_path), Demand(1))
    found = only(report.findings, "network answers")
    assert (found.state, found.area) == (ERROR, "network")
    assert {"cores", "run directory", "shared memory", "versions"} <= {finding.check for finding in report.findings}


def test_a_machine_that_has_not_reported():
    view = seen(HostReport("node1"), HostReport("node2"))
    assert "node2" in only(judge(replace(view, hosts={"node1": HostReport("node1")})), "facts").found


def test_report_in_both_forms():
    report = HostReport("node1", [CORES, FULL], environment={"torch_version": "2.13.0"})
    view = seen(report, failures={1: "did not answer; it was meeting the others"})
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
