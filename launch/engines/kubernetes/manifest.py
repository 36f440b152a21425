"""The manifests of `launch=kubernetes`, as plain values: a ConfigMap with the composed configuration, and the job.

The pods of a job are alike, whatever the job is called: each is one machine of the run and starts its ranks
(:mod:`trainwright.launch.engines.kubernetes.node`). What differs is who makes them, and which variables say where the
first one is. Fields are those of `trainer.kubeflow.org/v1alpha1` (Kubeflow Trainer from 2.2 on), `kubeflow.org/v1`
(Training Operator 1) and `jobset.x-k8s.io/v1alpha2`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.text.messages import RUN_TOKEN, token_environment
from trainwright.launch.outcome.ending import seconds_to_end

TRAINJOB, PYTORCHJOB, JOBSET = "trainjob", "pytorchjob", "jobset"
JOBS = (TRAINJOB, PYTORCHJOB, JOBSET)
RUN_LABEL = "trainwright/run"
"""Label of every pod of a run."""
CONFIG_FOLDER = "/etc/trainwright"
"""Where pods find the configuration."""
NODE_MODULE = "trainwright.launch.engines.kubernetes.node"

# Variables that the pods read, see `kubernetes_node`.
JOB_NAME, WORKDIR, POD_IP, ENDPOINT = (
    "TRAINWRIGHT_JOB", "TRAINWRIGHT_WORKDIR", "TRAINWRIGHT_POD_IP", "TRAINWRIGHT_ENDPOINT"
)  # fmt: skip
# Names of the group of pods, and of the container, that the operators know.
_GROUP = {TRAINJOB: "node", JOBSET: "node", PYTORCHJOB: "Worker"}
_CONTAINER = {TRAINJOB: "node", JOBSET: "node", PYTORCHJOB: "pytorch"}
_PORT_NAME = "pytorchjob-port"
_PATCH_MANAGER = "trainwright/launch"
_LONGEST_NAME = 40  # what is made of it has at most 63 characters
# Seconds that the agent and its container need to end after the ranks.
_GRACE_MARGIN = 15
_NO_LIMIT_SECONDS = 86400


def name_of(cfg: DictConfig) -> str:
    """Name of the job: the one that was given, or the run's, with what tells its run directory from others."""
    if cfg.launch.job_name is not None:
        return str(cfg.launch.job_name)
    run_dir = Path(cfg.run_dir).absolute()
    digest = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9]+", "-", f"{cfg.name}-{run_dir.name}".lower()).strip("-")
    words = words if words[:1].isalpha() else f"run-{words}"
    return f"{words[: _LONGEST_NAME - len(digest) - 1].strip('-')}-{digest}"


def manifests(cfg: DictConfig, verb: str, config: str) -> list[dict[str, Any]]:
    """The objects to create, the ConfigMap first and the job last.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        config: text of its `config.yaml`.
    """
    name = name_of(cfg)
    build: dict[str, Callable[[DictConfig, str, str], dict[str, Any]]] = {
        TRAINJOB: _trainjob,
        PYTORCHJOB: _pytorchjob,
        JOBSET: _jobset,
    }
    return [_config_map(cfg, name, config), build[cfg.launch.job](cfg, verb, name)]


# ---- the three kinds of job ------------------------------------------------------------------------------------------


def _trainjob(cfg: DictConfig, verb: str, name: str) -> dict[str, Any]:
    launch, pod = cfg.launch, _pod(cfg, verb, name)
    container = pod["spec"]["containers"][0]
    trainer = {
        "image": launch.image,
        "command": container["command"],
        "args": container["args"],
        "env": container["env"],
        "numNodes": cfg.nodes,
        "numProcPerNode": cfg.devices,
        **({"resourcesPerNode": container["resources"]} if "resources" in container else {}),
    }
    # The runtime has the rest of the pod; what a job may add to it is a patch.
    patch = {key: pod["spec"][key] for key in _PATCHED if key in pod["spec"]}
    patch["containers"] = [{"name": container["name"], "volumeMounts": container["volumeMounts"]}]
    template = {"template": {"spec": {"template": {"metadata": pod["metadata"], "spec": patch}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(cfg, name),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": launch.runtime_kind, "name": launch.runtime},
            "trainer": trainer,
            "runtimePatches": [
                {
                    "manager": _PATCH_MANAGER,
                    "trainingRuntimeSpec": {
                        "template": {"spec": {"replicatedJobs": [{"name": _GROUP[TRAINJOB], **template}]}}
                    },
                }
            ],
        },
    }


# Of a pod, that a TrainJob may set.
_PATCHED = (
    "imagePullSecrets",
    "nodeSelector",
    "serviceAccountName",
    "terminationGracePeriodSeconds",
    "tolerations",
    "volumes",
)


def _pytorchjob(cfg: DictConfig, verb: str, name: str) -> dict[str, Any]:
    launch, pod = cfg.launch, _pod(cfg, verb, name)
    del pod["spec"]["restartPolicy"]  # the operator sets it, from that of the replicas
    elastic = {
        "rdzvBackend": "c10d",
        "minReplicas": launch.min_nodes or cfg.nodes,
        "maxReplicas": cfg.nodes,
        **({} if launch.max_restarts is None else {"maxRestarts": launch.max_restarts}),
    }
    policy = {"cleanPodPolicy": "None", "backoffLimit": launch.backoff_limit, **_ttl(cfg)}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(cfg, name),
        "spec": {
            "runPolicy": policy,
            "nprocPerNode": str(cfg.devices),
            "elasticPolicy": elastic,
            "pytorchReplicaSpecs": {
                _GROUP[PYTORCHJOB]: {
                    "replicas": cfg.nodes,
                    "restartPolicy": launch.restart_policy,
                    "template": pod,
                }
            },
        },
    }


def _jobset(cfg: DictConfig, verb: str, name: str) -> dict[str, Any]:
    job = {
        "completionMode": "Indexed",
        "completions": cfg.nodes,
        "parallelism": cfg.nodes,
        "backoffLimit": 0,
        "template": _pod(cfg, verb, name),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(cfg, name),
        "spec": {
            # The headless service by which pods find each other is made from this.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": cfg.launch.backoff_limit},
            "replicatedJobs": [{"name": _GROUP[JOBSET], "replicas": 1, "template": {"spec": job}}],
            **_ttl(cfg),
        },
    }


# ---- what they have in common ----------------------------------------------------------------------------------------


def _config_map(cfg: DictConfig, name: str, config: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(cfg, name),
        "data": {"config.yaml": config},
    }


def _metadata(cfg: DictConfig, name: str) -> dict[str, Any]:
    where = {} if cfg.launch.namespace is None else {"namespace": cfg.launch.namespace}
    return {"name": name, **where, "labels": _labels(cfg, name)}


def _labels(cfg: DictConfig, name: str) -> dict[str, str]:
    return {**_plain(cfg.launch.labels), RUN_LABEL: name}


def _pod(cfg: DictConfig, verb: str, name: str) -> dict[str, Any]:
    """The template of all pods."""
    launch = cfg.launch
    annotations = _plain(launch.annotations)
    spec: dict[str, Any] = {
        "containers": [_container(cfg, verb, name)],
        "restartPolicy": launch.restart_policy,
        "terminationGracePeriodSeconds": _grace(cfg, verb),
        "volumes": _volumes(cfg, name),
    }
    if launch.node_selector:
        spec["nodeSelector"] = _plain(launch.node_selector)
    if launch.tolerations:
        spec["tolerations"] = [_plain(each) for each in launch.tolerations]
    if launch.service_account is not None:
        spec["serviceAccountName"] = launch.service_account
    if launch.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": each} for each in launch.image_pull_secrets]
    metadata = {"labels": _labels(cfg, name), **({"annotations": annotations} if annotations else {})}
    return {"metadata": metadata, "spec": spec}


def _container(cfg: DictConfig, verb: str, name: str) -> dict[str, Any]:
    launch = cfg.launch
    found: dict[str, Any] = {
        "name": _CONTAINER[launch.job],
        "image": launch.image,
        "command": [launch.python, "-u", "-m", NODE_MODULE],
        "args": [verb],
        "env": _environment(cfg, name),
        "ports": [{"name": _PORT_NAME, "containerPort": launch.rdzv_port, "protocol": "TCP"}],
        "volumeMounts": _mounts(cfg),
    }
    if launch.image_pull_policy is not None:
        found["imagePullPolicy"] = launch.image_pull_policy
    resources = _resources(cfg)
    if resources:
        found["resources"] = {"limits": resources, "requests": dict(resources)}
    return found


def _environment(cfg: DictConfig, name: str) -> list[dict[str, Any]]:
    launch = cfg.launch
    own: dict[str, str] = {JOB_NAME: name, WORKDIR: launch.mount}
    if RUN_TOKEN not in {*launch.env, *launch.secret_env}:
        own |= token_environment()
    if launch.job == JOBSET:
        own[ENDPOINT] = f"{name}-{_GROUP[JOBSET]}-0-0.{name}:{launch.rdzv_port}"
    found: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in own.items()]
    found.append({"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    found += [{"name": str(key), "value": str(value)} for key, value in launch.env.items()]
    for key, where in launch.secret_env.items():
        secret, _, entry = str(where).partition("/")
        found.append({"name": str(key), "valueFrom": {"secretKeyRef": {"name": secret, "key": entry}}})
    return found


def gpus_of(cfg: DictConfig) -> int:
    """GPUs of each pod."""
    if cfg.launch.gpus is not None:
        return int(cfg.launch.gpus)
    return int(cfg.devices) if cfg.accelerator == "gpu" else 0


def _resources(cfg: DictConfig) -> dict[str, Any]:
    launch, gpus = cfg.launch, gpus_of(cfg)
    found: dict[str, Any] = {}
    if launch.cpu is not None:
        found["cpu"] = str(launch.cpu)
    if launch.memory is not None:
        found["memory"] = str(launch.memory)
    if gpus:
        found[launch.gpu_resource] = str(gpus)
    return found | {key: str(value) for key, value in launch.resources.items()}


def _claims(cfg: DictConfig) -> list[tuple[str, str, str]]:
    """Name of the volume, claim and path of each claim."""
    more = [(f"volume-{at}", claim, path) for at, (claim, path) in enumerate(_plain(cfg.launch.volumes).items())]
    return [("run", cfg.launch.claim, cfg.launch.mount), *more]


def _volumes(cfg: DictConfig, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": volume, "persistentVolumeClaim": {"claimName": claim}} for volume, claim, _ in _claims(cfg)
    ]
    found.append({"name": "configuration", "configMap": {"name": name}})
    if cfg.launch.shm is not None:
        found.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(cfg.launch.shm)}})
    return found


def _mounts(cfg: DictConfig) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"name": volume, "mountPath": path} for volume, _, path in _claims(cfg)]
    found.append({"name": "configuration", "mountPath": CONFIG_FOLDER, "readOnly": True})
    if cfg.launch.shm is not None:
        found.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - that of the container
    return found


def _ttl(cfg: DictConfig) -> dict[str, Any]:
    seconds = cfg.launch.ttl_seconds
    return {} if seconds is None else {"ttlSecondsAfterFinished": seconds}


def _grace(cfg: DictConfig, verb: str) -> int:
    """Seconds that a pod has to end: its ranks may save before."""
    seconds = seconds_to_end(cfg, verb)
    return math.ceil(_NO_LIMIT_SECONDS if seconds is None else seconds) + _GRACE_MARGIN


def _plain(values: Any) -> dict[str, str]:
    container = OmegaConf.to_container(values) if OmegaConf.is_config(values) else values
    assert isinstance(container, Mapping)
    return {str(key): str(value) for key, value in container.items()}


def text_of(objects: list[dict[str, Any]]) -> str:
    """Manifests as one file for kubectl: JSON is yaml, but people read yaml."""
    import yaml  # type: ignore[import-untyped]

    # Through JSON, so that no list stands twice as a reference to itself.
    text: str = yaml.safe_dump_all(json.loads(json.dumps(objects)), sort_keys=False, width=120)
    return text
