"""`launch=kubernetes`: manifests against the published models, pods as processes, a small server as the cluster."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models
from omegaconf import DictConfig

from tests.command.project import environment
from tests.warm import WarmPopen
from trainwright import compose
from trainwright.command.run import plan, prepare
from trainwright.command.sweep import run_sweep
from trainwright.core.failures.failure import RankError
from trainwright.core.problems import ConfigError
from trainwright.core.run.interrupt import Interrupted
from trainwright.launch.checks.check_bounds import bound_problems
from trainwright.launch.engines.kubernetes import node as kubernetes_node
from trainwright.launch.engines.kubernetes import submit as kubernetes_submit
from trainwright.launch.engines.kubernetes.kubernetes import launch, problems
from trainwright.launch.engines.kubernetes.manifest import manifests, name_of
from trainwright.launch.engines.kubernetes.node import PodPlace, place_of, settle
from trainwright.launch.engines.kubernetes.submit import metrics_in, metrics_line

WORDS = (
    *("strategy=ddp", "devices=2", "nodes=2", "monitor=none", "logger=csv", "launch=kubernetes"),
    *("launch.image=registry/app:1", "launch.claim=runs", "run_dir=runs/mine"),
)


def configured(conf: Path, *more: str) -> DictConfig:
    return compose("mine", [*WORDS, *more], conf)


def rendered(conf: Path, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    config_map, job = manifests(configured(conf, *more), "fit", "name: mine\n")
    return config_map, job


# ---- what is written -------------------------------------------------------------------------------------------------

EVERYTHING = (
    *("accelerator=gpu", "launch.cpu=16", "launch.memory=64Gi", "launch.resources={rdma/ib:1}"),
    *("launch.namespace=team", "launch.max_restarts=3", "launch.image_pull_secrets=[registry]"),
    *("launch.volumes={data:/data}", "launch.env={NCCL_DEBUG:INFO}", "launch.secret_env={WANDB_API_KEY:wandb/key}"),
    *("launch.labels={kueue.x-k8s.io/queue-name:team}", "launch.annotations={a:b}", "launch.node_selector={gpu:h100}"),
    *("launch.tolerations=[{key:gpu,operator:Exists,effect:NoSchedule}]", "launch.service_account=trainer"),
)


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the pod template in the job's patch of its runtime."""
    [patch] = job["spec"]["runtimePatches"]
    [group] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert group["name"] == "node"
    template: dict[str, Any] = group["template"]["spec"]["template"]
    return template


def known(model: Any, given: dict[str, Any]) -> bool:
    """Return whether a published model has a field for each value; models drop unknown ones."""
    return bool(json.loads(json.dumps(model.from_dict(given).to_dict(), default=str)) == given)


@pytest.mark.parametrize("more", [(), EVERYTHING], ids=["least", "everything"])
def test_manifests_match_the_published_models(conf: Path, more: tuple[str, ...]) -> None:
    config_map, job = rendered(conf, *more)
    assert known(models.TrainerV1alpha1TrainJob, job)
    assert job["metadata"]["name"] == config_map["metadata"]["name"] == name_of(configured(conf))
    job["spec"]["trainer"]["image_of_no_model"] = "a"
    assert not known(models.TrainerV1alpha1TrainJob, job)


def test_trainjob_contents(conf: Path) -> None:
    config_map, job = rendered(conf, *EVERYTHING, "preemption.deadline_seconds=300")
    trainer, pod, name = job["spec"]["trainer"], pod_of(job), job["metadata"]["name"]
    assert config_map["data"] == {"config.yaml": "name: mine\n"}
    assert config_map["metadata"]["namespace"] == job["metadata"]["namespace"] == "team"
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["args"]) == (2, 2, ["fit"])
    assert trainer["command"] == ["python", "-u", "-m", "trainwright.launch.engines.kubernetes.node"]
    limits = {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "2", "rdma/ib": "1"}
    assert trainer["resourcesPerNode"] == {"limits": limits, "requests": limits}
    variables = {each["name"]: each.get("value", each.get("valueFrom")) for each in trainer["env"]}
    assert variables["NCCL_DEBUG"] == "INFO"
    assert variables["WANDB_API_KEY"] == {"secretKeyRef": {"name": "wandb", "key": "key"}}
    assert variables["TRAINWRIGHT_WORKDIR"] == "/workspace"
    assert len(variables["TRAINWRIGHT_RUN_TOKEN"]) == 32  # pods of one job share it
    labels = {"kueue.x-k8s.io/queue-name": "team", "trainwright/run": name}
    assert pod["metadata"] == {"labels": labels, "annotations": {"a": "b"}}
    [container] = pod["spec"]["containers"]
    assert container["name"] == "node"
    mounts = {"run": "/workspace", "volume-0": "/data", "configuration": "/etc/trainwright", "shm": "/dev/shm"}
    assert {each["name"]: each["mountPath"] for each in container["volumeMounts"]} == mounts
    assert pod["spec"]["volumes"] == [
        {"name": "run", "persistentVolumeClaim": {"claimName": "runs"}},
        {"name": "volume-0", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "configuration", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
    ]
    assert pod["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["spec"]["nodeSelector"] == {"gpu": "h100"}
    assert pod["spec"]["serviceAccountName"] == "trainer"
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 315  # ranks may save before


def test_job_names(conf: Path) -> None:
    cfg = configured(conf)
    assert name_of(cfg).startswith("mine-mine-")
    other = configured(conf)
    other.run_dir = "runs/other"
    assert name_of(other) != name_of(cfg)
    other.run_dir = "multirun/2026-01-31_14-05-09/0_strategy=ddp,seed=2,module.hidden=16,and_more"
    assert len(name_of(other)) <= 40
    assert set(name_of(other)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert name_of(configured(conf, "launch.job_name=given")) == "given"


@pytest.mark.sample(3)
@pytest.mark.parametrize(("more", "said"), [
    (["launch.job_name=Run_1"], "launch.job_name=Run_1: must be at most 50 lower-case letters"),
    (["launch.memory=64GB"], "launch.memory=64GB: must be a quantity"),
    (["launch.gpus=1"], "devices=2 with launch.gpus=1: each rank of a pod needs one"),
    (["launch.gpus=2", "accelerator=cpu"], "launch.gpus=2 with accelerator=cpu"),
    (["launch.gpus=0", "accelerator=gpu"], "accelerator=gpu with launch.gpus=0"),
    (["launch.start_timeout=0"], "launch.start_timeout=0.0: must be a finite number of at least 1"),
    (["launch.runtime_kind=Runtime"], "launch.runtime_kind=Runtime: unknown"),
    (["run_dir=/elsewhere/run"], "is not below launch.mount=/workspace"),
    (["run_dir=../run"], "is not below launch.mount=/workspace"),
    (["launch.mount=here"], "launch.mount=here: must be a path from the root"),
    (["launch.volumes={data:data}"], "launch.volumes.data=data: must be a path from the root"),
    (["launch.env={PET_NNODES:3}"], "launch.env.PET_NNODES: is set by the launcher of the pods"),
    (["launch.secret_env={KEY:secret}"], "launch.secret_env.KEY=secret: must be secret/key"),
    (["launch.on_interrupt=stop"], "launch.on_interrupt=stop: unknown"),
])  # fmt: skip
def test_refused_options(conf: Path, more: list[str], said: str) -> None:
    cfg = configured(conf, *more)
    assert said in "\n".join([*bound_problems(cfg).values(), *problems(cfg)])


def test_required_options(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose("mine", ["strategy=ddp", "devices=2", "nodes=2", "launch=kubernetes"], conf)
    found = "\n".join(plan(cfg, "fit")[1])
    assert "launch.image has no value" in found
    assert "launch.claim has no value" in found
    assert not problems(configured(conf))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'trainwright[kubernetes]'" in "\n".join(problems(configured(conf, "launch.submit=true")))


def test_manifest_without_submit(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = prepare(configured(conf), "fit")
    assert launch(cfg, "fit") is None
    config_map, job = yaml.safe_load_all(Path("runs/mine/kubernetes.yaml").read_text())
    assert config_map["data"]["config.yaml"] == Path("runs/mine/config.yaml").read_text()
    assert job["kind"] == "TrainJob"
    said = capsys.readouterr().out
    assert "kubectl apply -f runs/mine/kubernetes.yaml" in said
    assert f"-l trainwright/run={job['metadata']['name']}" in said


def test_sweep_manifests(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [word for word in WORDS if not word.startswith("run_dir=")]
    assert run_sweep("fit", ["recipe=mine", *given, "seed=1,2", "run_dir=runs/sweep"], conf) == 0
    files = sorted(Path("runs/sweep").glob("*/kubernetes.yaml"))
    assert [path.parent.name for path in files] == ["0_seed=1", "1_seed=2"]
    assert len({list(yaml.safe_load_all(path.read_text()))[1]["metadata"]["name"] for path in files}) == 2
    assert "2 of 2 jobs were written" in capsys.readouterr().out


# ---- pods ------------------------------------------------------------------------------------------------------------


def test_place_of_a_pod() -> None:
    for rank in (0, 1):
        variables = {"PET_MASTER_ADDR": "a-node-0-0.a", "PET_MASTER_PORT": "29500", "PET_NODE_RANK": str(rank)}
        assert place_of(variables) == PodPlace("a-node-0-0.a", 29500, is_first=rank == 0)
    with pytest.raises(ValueError, match="PET_MASTER_ADDR is not set: this program runs in the pods of"):
        place_of({})


def test_first_pod_creates_the_run_directory(conf: Path) -> None:
    cfg = prepare(configured(conf), "fit")
    text = Path("runs/mine/config.yaml").read_text()
    assert settle(cfg, text) is None  # the volume is the one that the command has written to
    assert "holds another run already" in str(settle(cfg, text + "# another\n"))
    cfg.resume = "auto"
    assert settle(cfg, text + "# another\n") is None
    assert Path("runs/mine/config.1.yaml").is_file()
    cfg.run_dir = "runs/new"
    assert settle(cfg, text) is None
    assert Path("runs/new/config.yaml").is_file()


def test_failed_pod_cleans_up(conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TimeoutError("the first pod has not answered")

    prepare(configured(conf), "fit")
    folder, temporary = str(Path("runs/mine").absolute()), tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(kubernetes_node, "_run", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for name, value in (("PET_MASTER_ADDR", "a"), ("TRAINWRIGHT_WORKDIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    with pytest.raises(TimeoutError):
        kubernetes_node.main(["fit"], folder)
    assert not list(temporary.iterdir())


@pytest.mark.thorough
def test_two_pods_train(conf: Path, tmp_path: Path) -> None:
    """Pods of a TrainJob on two addresses of this machine; the volume is a folder."""
    prepare(configured(conf, "devices=1", "strategy=ddp"), "fit")
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    volume = tmp_path / "volume"
    volume.mkdir()
    folder = str(Path("runs/mine").absolute())
    code = f"from trainwright.launch.engines.kubernetes.node import main; raise SystemExit(main(['fit'], {folder!r}))"
    own = {"TRAINWRIGHT_JOB": "a", "TRAINWRIGHT_RUN_TOKEN": "a secret", "TRAINWRIGHT_WORKDIR": str(volume)}
    own |= {"PET_MASTER_ADDR": "127.0.0.2", "PET_MASTER_PORT": str(port)}
    own |= {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    of_pods = [{"PET_NODE_RANK": str(at), "TRAINWRIGHT_POD_IP": f"127.0.0.{at + 2}"} for at in range(2)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pods = [WarmPopen([sys.executable, "-c", code], env=environment() | own | each, **options) for each in of_pods]
    try:
        said = [pod.communicate(timeout=240)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(said)
    for rank in (0, 1):
        assert sum(f"[rank {rank}] first step of rank {rank}" in text for text in said) == 1
    assert [metrics_in(line) is not None for text in said for line in text.split("\n")].count(True) == 1
    assert (volume / "runs/mine/checkpoints").is_dir()


# ---- a cluster -------------------------------------------------------------------------------------------------------


class FakeCluster:
    """The endpoints of an API server that a submitted job needs."""

    def __init__(self) -> None:
        self.objects: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.deleted: dict[str, str] | None = None
        self.pods: list[dict[str, Any]] = []
        self.logs: dict[str, list[str]] = {}
        self.conditions: list[dict[str, str]] = []
        self.refuse: tuple[int, str] | None = None
        self.when_asked: Callable[[], None] = lambda: None
        self.silent = 0  # questions that are not answered, from the next on
        handler = type("Handler", (_Handler,), {"cluster": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def kubeconfig(self) -> str:
        address = f"http://127.0.0.1:{self.server.server_port}"
        return f"""
            apiVersion: v1
            kind: Config
            clusters: [{{name: fake, cluster: {{server: "{address}"}}}}]
            users: [{{name: me, user: {{}}}}]
            contexts: [{{name: here, context: {{cluster: fake, user: me, namespace: team}}}}]
            current-context: here
        """

    def add_pod(self, name: str, *lines: str, exit_code: int = 0) -> None:
        state = {"terminated": {"exitCode": exit_code}}
        status = {"phase": "Succeeded", "containerStatuses": [{"restartCount": 0, "state": state}]}
        self.pods.append({"metadata": {"name": name, "uid": name}, "status": status})
        self.logs[name] = list(lines)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class _Handler(BaseHTTPRequestHandler):
    cluster: FakeCluster

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(body, bytes) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"kind": "Status", "message": message})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        self.cluster.asked.append(self.path)
        if self.cluster.refuse is not None:
            return self._refuse(*self.cluster.refuse)
        self.cluster.objects.append(body)
        return self._answer(201, body | {"metadata": body["metadata"] | {"uid": "1-2-3"}})

    def do_GET(self) -> None:
        self.cluster.asked.append(self.path)
        if self.cluster.silent:
            self.cluster.silent -= 1
            return self._refuse(503, "being updated")
        if "/log" in self.path:
            pod = self.path.split("/pods/")[1].split("/")[0]
            return self._answer(200, "".join(f"{line}\n" for line in self.cluster.logs[pod]).encode())
        if "/pods" in self.path:
            return self._answer(200, {"items": [] if self.cluster.deleted is not None else self.cluster.pods})
        self.cluster.when_asked()
        return self._answer(200, {"status": {"conditions": self.cluster.conditions}})

    def do_DELETE(self) -> None:
        if self.cluster.refuse is not None:
            return self._refuse(*self.cluster.refuse)
        self.cluster.deleted = {"path": self.path}
        return self._answer(200, {})


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    found = FakeCluster()
    path = tmp_path / "kubeconfig"
    path.write_text(found.kubeconfig)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield found
    found.close()


def submitted(conf: Path, *more: str) -> DictConfig:
    return prepare(configured(conf, "launch.submit=true", "launch.poll_seconds=0.1", *more), "fit")


def test_submitted_job(conf: Path, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.add_pod("mine-node-0-0", "hello", "[rank 0] step 1", metrics_line({"loss": 0.5}))
    cluster.add_pod("mine-node-0-1", "[rank 1] step 1")
    cluster.conditions = [{"type": "Complete", "status": "True"}]
    assert launch(submitted(conf), "fit") == {"loss": 0.5}
    job, config_map = cluster.objects
    assert job["kind"] == "TrainJob"
    assert cluster.asked[0].startswith("/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs")
    owner = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "uid": "1-2-3"}
    assert config_map["metadata"]["ownerReferences"] == [{**owner, "name": job["metadata"]["name"]}]
    said = capsys.readouterr().out.splitlines()
    assert {"[mine-node-0-0] hello", "[rank 0] step 1", "[rank 1] step 1"} <= set(said)
    assert not any("metrics" in line for line in said)
    assert cluster.deleted is None


class EndlessLogs:
    """Logs of pods that end on request."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.asked: list[str] = []

    def log(self, pod: str) -> Iterator[str]:
        self.asked.append(pod)
        yield f"{pod} has begun"
        assert self.ended.wait(60)


def test_concurrent_pod_logs_are_limited() -> None:
    def pods(failed: int = -1) -> list[dict[str, Any]]:
        return [
            {"metadata": {"name": f"a-{at}", "uid": at}, "status": {"phase": "Failed" if at == failed else "Running"}}
            for at in reversed(range(200))
        ]

    cluster = EndlessLogs()
    logs = kubernetes_submit._Logs(cluster)  # type: ignore[arg-type]
    logs.look(pods())
    logs.look(pods(failed=150))
    assert sorted(cluster.asked) == sorted(f"a-{at}" for at in range(64))
    cluster.ended.set()
    logs.finish()
    assert cluster.asked[64] == "a-150"
    assert sorted(cluster.asked) == sorted(logs.last_lines) == sorted(f"a-{at}" for at in range(200))
    logs.close()


def test_failed_job(conf: Path, cluster: FakeCluster) -> None:
    cluster.add_pod("mine-node-0-0", exit_code=143)
    cluster.add_pod("mine-node-0-1", "trainwright: rank 1 of 4 failed with ValueError: boom", exit_code=1)
    cluster.conditions = [{"type": "Failed", "status": "True", "reason": "JobFailed", "message": "pods failed"}]
    with pytest.raises(RankError) as failed:
        launch(submitted(conf), "fit")
    assert "(JobFailed: pods failed); mine-node-0-1 ended with exit code 1" in str(failed.value)
    assert "rank 1 of 4 failed with ValueError: boom" in str(failed.value)


def test_interrupted_pods(conf: Path, cluster: FakeCluster) -> None:
    cluster.add_pod("mine-node-0-0", exit_code=143)
    cluster.conditions = [{"type": "Failed", "status": "True"}]
    with pytest.raises(Interrupted) as ended:
        launch(submitted(conf), "fit")
    assert ended.value.exit_code == 143


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["delete", "leave"])
def test_ctrl_c(how: str, conf: Path, cluster: FakeCluster) -> None:
    cluster.add_pod("mine-node-0-0", "[rank 0] step 1")
    cluster.when_asked = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Interrupted) as ended:
        launch(submitted(conf, f"launch.on_interrupt={how}"), "fit")
    assert ended.value.exit_code == 130
    assert (cluster.deleted is not None) == (how == "delete")


@pytest.mark.thorough
def test_unresponsive_cluster(conf: Path, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.add_pod("mine-node-0-0", metrics_line({"loss": 0.5}))
    cluster.conditions = [{"type": "Complete", "status": "True"}]
    cluster.silent = 2
    assert launch(submitted(conf), "fit") == {"loss": 0.5}
    monkeypatch.setattr("trainwright.launch.engines.kubernetes.submit._SILENCE_SECONDS", 0.0)
    cluster.silent = 2
    with pytest.raises(RankError, match="the cluster has not responded for 0 s, and TrainJob .* may still be running"):
        launch(submitted(conf, "run_dir=runs/other"), "fit")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("status", "goes_on"), [(403, True), (404, False)])
def test_failed_deletion(
    status: int, goes_on: bool, conf: Path, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        cluster.refuse = (status, "may not delete")
        cluster.deleted = {} if status == 404 else None
        os.kill(os.getpid(), signal.SIGINT)

    cluster.when_asked = interrupt
    with pytest.raises(Interrupted):
        launch(submitted(conf), "fit")
    said = capsys.readouterr().err
    assert ("was not deleted, the cluster refuses it (403 Forbidden): may not delete; type kubectl" in said) == goes_on


@pytest.mark.sample(2)
@pytest.mark.parametrize(("status", "said"), [
    (404, "the cluster knows no trainer.kubeflow.org/v1alpha1 trainjobs"),
    (409, "the name is taken"),
    (422, "the cluster refuses it (422 Unprocessable Entity): spec.x is wrong"),
])  # fmt: skip
def test_refused_job(conf: Path, cluster: FakeCluster, status: int, said: str) -> None:
    cluster.refuse = (status, "spec.x is wrong")
    with pytest.raises(ConfigError) as refused:
        launch(submitted(conf), "fit")
    assert said in str(refused.value)


def test_unknown_context(conf: Path, cluster: FakeCluster) -> None:
    with pytest.raises(ConfigError, match=r"launch\.context=elsewhere: is not in the kubeconfig; contexts: here"):
        launch(submitted(conf, "launch.context=elsewhere"), "fit")
