"""What is said of machines that are not well: each finding is provoked by facts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trainwright.strategies.contract.communication.advice import Link
from trainwright.tools.doctor.clocks import Offset, judge_clocks, offset_of
from trainwright.tools.doctor.collect import HostFacts, within
from trainwright.tools.doctor.devices import (
    DeviceFacts,
    Gpu,
    judge_devices,
    judge_same_nccl,
    parse_gpus,
    runs_on,
    xids_of,
)
from trainwright.tools.doctor.finding import ERROR, OK, WARNING, Finding
from trainwright.tools.doctor.libraries import LibraryFacts, judge_libraries, judge_same, library_facts
from trainwright.tools.doctor.limits import (
    Demand,
    FolderFacts,
    LimitFacts,
    SharedMemoryFacts,
    file_system,
    folder_facts,
    judge_limits,
    judge_run_dir,
    judge_shared_memory,
    judge_tmp,
    limit_facts,
)
from trainwright.tools.doctor.machine import MachineFacts, cpu_quota, judge_import, judge_machine
from trainwright.tools.doctor.network import (
    Interface,
    NetworkFacts,
    Pair,
    judge_meeting,
    judge_network,
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


# ---------------------------------------------------------------------------------------------------------------------
# Machine

MACHINE = MachineFacts(cores=8, quota=None, memory=64 * GIB, available=60 * GIB)


@pytest.mark.parametrize(
    ("facts", "demand", "check", "state", "todo"),
    [
        ({}, Demand(4, 4, threads=2), "cores", OK, ""),
        ({"quota": 2.0}, Demand(4, 4), "cores", WARNING, "devices=2"),
        ({}, Demand(4, 4, threads=8), "cores", WARNING, "launch.threads=2"),
        ({}, Demand(4, 4, workers=16), "cores", WARNING, "num_workers=4"),
        ({"available": 3 * GIB}, Demand(4, 4), "memory", WARNING, "docker run --memory"),
        ({"available": GIB, "memory_limit": GIB}, Demand(4, 4), "memory", ERROR, "docker run --memory"),
        ({"start_method": "spawn", "platform": "darwin"}, Demand(1, 1), "start of processes", WARNING, "linux"),
    ],
)
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
    import threading

    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        within(0.05, lambda: threading.Event().wait(0.5))
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 / 0)


# ---------------------------------------------------------------------------------------------------------------------
# Devices

H100 = Gpu(0, "GPU-aa", "NVIDIA H100", 80 * GIB, 0, True, 0, "9.0", "00000000:01:00.0")
GPUS = DeviceFacts(
    gpus=[H100, replace(H100, index=1, uuid="GPU-bb")],
    files=["/dev/nvidia0", "/dev/nvidia1"],
    driver="550.54",
    driver_cuda="12.4",
    torch_cuda="12.8",
    usable=2,
    architectures=["sm_80", "sm_90"],
    nccl="2.27.5",
    nccl_installed="2.27.5",
    xids=[],
)
TWO = Demand(2, 2, on_gpu=True)


def test_devices_that_are_well():
    assert states(judge_devices(GPUS, TWO)) == {OK}
    assert states(judge_devices(DeviceFacts(), Demand(2, 2))) == {OK}


@pytest.mark.parametrize(
    ("facts", "demand", "check", "state", "todo"),
    [
        ({}, Demand(4, 4, on_gpu=True), "GPUs", ERROR, "devices=2"),
        ({"usable": 0, "torch_cuda": None}, TWO, "torch and CUDA", ERROR, "CUDA build"),
        ({"usable": 0, "visible": ""}, TWO, "CUDA_VISIBLE_DEVICES", ERROR, "unset"),
        ({"usable": 0, "driver_cuda": "11.4"}, TWO, "driver", ERROR, "newer driver"),
        ({"usable": 0, "torch_says": "Error 802: system not yet initialized"}, TWO, "GPUs", ERROR, "fabric manager"),
        ({"visible": "0,5"}, TWO, "CUDA_VISIBLE_DEVICES", ERROR, "unset"),
        ({"visible": "1,1"}, TWO, "CUDA_VISIBLE_DEVICES", ERROR, "correct"),
        ({"architectures": ["sm_80", "sm_86"]}, TWO, "kernels", ERROR, "build of torch"),
        ({"nccl": ""}, TWO, "NCCL", ERROR, "devices=1"),
        ({"nccl": "2.19.3"}, TWO, "NCCL", WARNING, "LD_LIBRARY_PATH"),
        ({"gpus": [replace(H100, uncorrected=3)]}, TWO, "memory of GPUs", ERROR, "nvidia-smi -r"),
        ({"gpus": [replace(H100, remap_failed=True)]}, TWO, "memory of GPUs", ERROR, "exchanged"),
        ({"gpus": [replace(H100, remap_pending=True)]}, TWO, "memory of GPUs", WARNING, "nvidia-smi -r"),
        ({"gpus": [replace(H100, persistent=False)]}, TWO, "persistence", WARNING, "nvidia-smi -pm 1"),
        ({"gpus": [replace(H100, used=30 * GIB)]}, TWO, "use of GPUs", WARNING, "nvidia-smi"),
        ({"gpus": [H100, replace(H100, name="NVIDIA A100")]}, TWO, "GPUs", WARNING, "balance"),
        ({"xids": [("0000:01:00", 79)]}, TWO, "Xid", ERROR, "fallen off the bus"),
        ({"xids": [("0000:01:00", 63)]}, TWO, "Xid", WARNING, "reset"),
    ],
)
def test_devices(facts, demand, check, state, todo):
    bad = replace(GPUS, **facts)
    if check == "kernels":
        bad = replace(bad, gpus=[H100])
    found = only(judge_devices(bad, demand), check)
    assert found.state == state
    assert todo in found.todo


def test_a_gpu_is_asked_for_where_there_is_none():
    assert only(judge_devices(DeviceFacts(), Demand(1, 1), "gpu"), "GPUs").state == ERROR
    assert states(judge_devices(replace(GPUS, usable=0), TWO, "cpu")) == {OK}


def test_errors_of_programs_are_not_of_the_machine():
    # Xid 13 and 31 are what a wrong index in a kernel makes.
    assert states(judge_devices(replace(GPUS, xids=[("0000:01:00", 31), ("0000:01:00", 13)]), TWO)) == {OK}
    log = "[ 1.2] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n[ 2.0] else\n"
    assert xids_of(log) == [("0000:3b:00", 79)]
    assert xids_of(None) is None


def test_which_kernels_run_on_which_gpu():
    assert runs_on("9.0", ["sm_80", "sm_90"])
    assert runs_on("8.9", ["sm_80"])
    assert runs_on("12.0", ["compute_90"])
    assert runs_on("10.0", ["sm_90", "sm_100"])
    assert not runs_on("8.0", ["sm_86", "sm_90"])
    assert not runs_on("10.0", ["sm_90a"])
    assert not runs_on("7.0", ["compute_80"])


def test_lines_of_nvidia_smi():
    rows = [
        "0, GPU-aa, NVIDIA H100 80GB HBM3, 550.54, 81559, 4, Enabled, 0, 9.0, 00000000:01:00.0",
        "1, GPU-bb, NVIDIA L4, 550.54, 23034, 1, Disabled, [N/A], 8.9, 00000000:02:00.0",
    ]
    (first, driver), (second, _) = parse_gpus(rows, ["00000000:01:00.0, Yes, No"])
    assert driver == "550.54"
    assert (first.memory, first.persistent, first.uncorrected, first.remap_pending) == (81559 * 2**20, True, 0, True)
    assert (second.capability, second.persistent, second.uncorrected) == ("8.9", False, None)


def test_nccl_of_two_machines():
    found = only(judge_same_nccl({"a": GPUS, "b": replace(GPUS, nccl="2.19.3")}), "NCCL everywhere")
    assert found.state == ERROR
    assert "2.19.3 on b" in found.found
    assert judge_same_nccl({"a": GPUS, "b": GPUS}) == []


# ---------------------------------------------------------------------------------------------------------------------
# Libraries

LIBRARIES = LibraryFacts(
    "3.12.1",
    "<3.14,>=3.11",
    ["torch<2.14,>=2.11", "lightning<2.7,>=2.6.4", 'transformers<6,>=5.20; extra == "huggingface"'],
    {"torch": "2.13.0+cpu", "lightning": "2.6.6", "numpy": "2.4.6"},
    ["gloo"],
)


@pytest.mark.parametrize(
    ("facts", "check", "state", "todo"),
    [
        ({}, "versions", OK, ""),
        ({"python": "3.10.2"}, "python", ERROR, "3.11"),
        ({"installed": {"lightning": "2.6.6"}}, "torch", ERROR, "pip install 'torch<2.14,>=2.11'"),
        ({"installed": {"torch": "2.4.0", "lightning": "2.6.6"}}, "torch", ERROR, "pip install"),
        ({"installed": {**LIBRARIES.installed, "transformers": "4.1"}}, "transformers", WARNING, "pip install"),
        ({"installed": {"torch": "2.13.0", "lightning": "2.6.2"}}, "compromised release", ERROR, "every password"),
        ({"installed": {"pytorch-lightning": "2.6.3"}}, "compromised release", ERROR, "every password"),
        ({"backends": []}, "backends", ERROR, "gloo"),
    ],
)
def test_libraries(facts, check, state, todo):
    found = only(judge_libraries(replace(LIBRARIES, **facts)), check)
    assert found.state == state
    assert todo in found.todo


def test_this_environment_is_allowed():
    facts = library_facts()
    assert facts.requirements
    assert states(judge_libraries(facts)) == {OK}


def test_versions_of_two_machines():
    other = replace(LIBRARIES, installed={**LIBRARIES.installed, "torch": "2.12.1"})
    found = only(judge_same({"a": LIBRARIES, "b": other}), "torch everywhere")
    assert found.state == ERROR
    assert "2.12.1 on b" in found.found
    assert states(judge_same({"a": LIBRARIES, "b": LIBRARIES})) == {OK}


# ---------------------------------------------------------------------------------------------------------------------
# Network

ETH = Interface("eth0", True, False, "10.0.0.2", 12.5e9)
LOOPBACK = Interface("lo", True, True, "127.0.0.1")
DOCKER = Interface("docker0", True, False, "172.17.0.1")
DOWN = Interface("ib0", False)
NETWORK = NetworkFacts("node1", ["10.0.0.2"], [LOOPBACK, ETH, DOCKER, DOWN], {}, [])


@pytest.mark.parametrize(
    ("variables", "hosts", "check", "state", "found"),
    [
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
    ],
)
def test_interfaces_that_variables_choose(variables, hosts, check, state, found):
    finding = only(judge_network(replace(NETWORK, variables=variables), hosts), check)
    assert finding.state == state
    assert found in finding.found
    assert state == OK or f"export {check}=eth0" in finding.todo


@pytest.mark.parametrize(
    ("facts", "hosts", "check", "state", "todo"),
    [
        ({"addresses": ["127.0.1.1"]}, 1, "host name", OK, ""),
        ({"addresses": ["127.0.1.1"]}, 2, "host name", ERROR, "'10.0.0.2 node1' into /etc/hosts"),
        ({"addresses": []}, 2, "host name", ERROR, "/etc/hosts"),
        ({"addresses": ["127.0.1.1"], "variables": {"GLOO_SOCKET_IFNAME": "eth0"}}, 2, "host name", OK, ""),
        ({"addresses": ["172.17.0.1"]}, 2, "GLOO_SOCKET_IFNAME", WARNING, "export GLOO_SOCKET_IFNAME=eth0"),
        ({"variables": {"MASTER_ADDR": "localhost"}, "master": ["127.0.0.1", "::1"]}, 2, "MASTER_ADDR", ERROR, "rdzv"),
        ({"variables": {"MASTER_ADDR": "nowhere"}, "master": []}, 2, "MASTER_ADDR", ERROR, "rdzv"),
        ({"variables": {"MASTER_ADDR": "node0"}, "master": ["10.0.0.1"]}, 2, "MASTER_ADDR", OK, ""),
    ],
)
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
    found = only(judge_meeting({2: "did not answer; it was meeting the others"}, 4, NETWORK), "ranks")
    assert found.state == ERROR
    assert "rank 2" in found.found
    assert "GLOO_SOCKET_IFNAME=eth0" in found.todo


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_every_pair_meets_once_and_nobody_twice_in_a_round(ranks):
    rounds = rounds_of_pairs(ranks)
    together = [pair for pairs in rounds for pair in pairs]
    assert sorted(together) == [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    for pairs in rounds:
        taking_part = [rank for pair in pairs for rank in pair]
        assert len(taking_part) == len(set(taking_part))


# ---------------------------------------------------------------------------------------------------------------------
# Clocks


def test_clocks():
    hosts = ["a", "a", "b", "b"]
    assert states(judge_clocks([Offset(1, 1e-5, 1e-5), Offset(2, 0.06, 0.02)], hosts)) == {OK}
    late = only(judge_clocks([Offset(1, 0.0, 1e-5), Offset(2, -0.5, 1e-3), Offset(3, -0.4, 1e-3)], hosts), "clock")
    assert late.state == WARNING
    assert "clock of b is 500.0 ms behind that of a" in late.found
    assert only(judge_clocks([Offset(2, 3600.0, 1e-3)], hosts), "clock").state == ERROR


def test_an_offset_is_that_of_the_quickest_answer():
    # Ten ahead; the second question is answered at once, the first was kept waiting on its way back.
    offset = offset_of(1, [(110.0, 100.1, 118.0), (120.0, 110.25, 120.5)])
    assert offset == Offset(1, pytest.approx(10.0), pytest.approx(0.25))


# ---------------------------------------------------------------------------------------------------------------------
# Limits

LIMITS = LimitFacts(files=(65536, 65536), processes=(-1, -1), locked=(65536, 65536), core=(0, -1))


@pytest.mark.parametrize(
    ("facts", "demand", "check", "state", "todo"),
    [
        ({}, Demand(8, 8), "open files", OK, ""),
        ({"files": (1024, 524288)}, Demand(8, 8), "open files", WARNING, "ulimit -n 524288"),
        ({"files": (1024, 1024)}, Demand(8, 8), "open files", WARNING, "limits.conf"),
        ({"files": (1024, -1)}, Demand(8, 2048), "open files", ERROR, "ulimit -n 8448"),
        ({"processes": (500, 500)}, Demand(8, 8, threads=8), "processes", WARNING, "ulimit -u"),
        ({"processes": (100, 100)}, Demand(8, 8, threads=8), "processes", ERROR, "ulimit -u"),
        ({"cgroup_processes": 100}, Demand(8, 8, threads=8), "processes", ERROR, "--pids-limit"),
        ({"infiniband": ("mlx5_0",)}, Demand(8, 16, hosts=2), "locked memory", ERROR, "ulimit -l unlimited"),
        ({"infiniband": ("mlx5_0",)}, Demand(8, 8), "locked memory", OK, ""),
        ({"core": (-1, -1)}, Demand(8, 8), "core files", WARNING, "ulimit -c 0"),
        ({"core": (-1, -1), "core_pattern": "|/usr/lib/systemd/systemd-coredump"}, Demand(8, 8), "core files", OK, ""),
    ],
)
def test_limits(facts, demand, check, state, todo):
    judged = judge_limits(replace(LIMITS, **facts), demand, run_dir_free=10 * GIB, memory=64 * GIB)
    found = only(judged, check)
    assert found.state == state
    assert todo in found.todo


FOLDER = FolderFacts("runs", "/data", 100 * GIB, 0.5, "ext4")


def test_disks():
    assert states(judge_run_dir(FOLDER)) == {OK}
    assert only(judge_run_dir(replace(FOLDER, free=5 * GIB)), "run directory").state == WARNING
    assert only(judge_run_dir(replace(FOLDER, free=GIB // 2)), "run directory").state == ERROR
    assert only(judge_run_dir(replace(FOLDER, inodes=0.001)), "run directory").state == WARNING
    sealed = only(judge_run_dir(replace(FOLDER, problem="Read-only file system")), "run directory")
    assert sealed.state == ERROR
    assert "Read-only" in sealed.found
    assert only(judge_tmp(replace(FOLDER, free=2**20)), "temporary files").state == ERROR
    assert only(judge_tmp(replace(FOLDER, kind="nfs4")), "temporary files on a network").state == WARNING


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
    docker = SharedMemoryFacts(64 * 2**20, 64 * 2**20)
    assert states(judge_shared_memory(docker, Demand(2, 2))) == {OK}
    found = only(judge_shared_memory(docker, Demand(2, 2, workers=4)), "shared memory")
    assert found.state == ERROR
    assert "--shm-size=2g" in found.todo
    assert only(judge_shared_memory(docker, Demand(2, 2, on_gpu=True)), "shared memory").state == WARNING


def test_limits_of_this_process():
    import resource

    assert limit_facts().files[0] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# ---------------------------------------------------------------------------------------------------------------------
# All together


def host(name: str, **facts: object) -> HostFacts:
    known = {
        "machine": MACHINE,
        "limits": LIMITS,
        "run_dir": FOLDER,
        "tmp": FOLDER,
        "shared_memory": SharedMemoryFacts(32 * GIB, 32 * GIB),
        "network": replace(NETWORK, host=name),
        "libraries": LIBRARIES,
        "devices": GPUS,
        "import_seconds": 4.0,
    }
    return HostFacts(name, **{**known, **facts})  # type: ignore[arg-type]


def seen(*hosts: HostFacts, failures: dict[int, str] | None = None) -> Seen:
    results = [
        RankResult(2 * index + local, each.host, (failures or {}).get(2 * index + local))
        for index, each in enumerate(hosts)
        for local in range(2)
    ]
    return Seen({each.host: each for each in hosts}, results, True, 1, 2)


def test_facts_travel_whole():
    sent = host("node1", devices=replace(GPUS, xids=[("0000:01:00", 79)]))
    received = HostFacts.from_json(sent.to_json())
    assert received == sent
    result = RankResult(1, "b", None, Offset(1, 0.5, 0.1), [Pair(1, 0, 1e-5, 1e9)], (1, 1), [Link("all", 2, 1e-5, 1e9)])
    assert RankResult.from_json(result.to_json()) == result


def test_what_is_true_of_all_machines_is_said_once():
    findings = judge(seen(host("node1"), host("node2")))
    assert [finding.where for finding in findings if finding.check == "cores"] == [""]
    bad = host("node2", run_dir=replace(FOLDER, free=0))
    of_disk = {f.state: f.where for f in judge(seen(host("node1"), bad)) if f.check == "run directory"}
    assert of_disk == {OK: "node1", ERROR: "node2"}


def test_a_machine_that_does_not_answer():
    findings = judge(seen(host("node1", run_dir=None, unanswered={"run_dir": "no answer within 20 s"})))
    assert only(findings, "run dir answers").state == ERROR
    view = seen(host("node1"), host("node2"))
    silent = judge(replace(view, hosts={"node1": view.hosts["node1"]}))
    assert "node2" in only(silent, "facts").found


def test_report_in_both_forms():
    view = seen(host("node1"), failures={1: "did not answer; it was meeting the others"})
    findings = judge(view)
    document = json.loads(to_json(findings, view))
    assert document["hosts"] == ["node1"]
    assert document["counts"][ERROR] == 1 == sum(f["state"] == ERROR for f in document["findings"])
    text = to_text(findings, view)
    assert "ERROR    ranks: 1 of 2 ranks failed: rank 1: did not answer" in text
    assert "do:     export GLOO_SOCKET_IFNAME=eth0" in text
    assert f"1 errors, {document['counts'][WARNING]} warnings" in text
