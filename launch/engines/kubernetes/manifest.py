"""Manifests of `launch=kubernetes` as plain values: a ConfigMap with the composed configuration, and the job.

The job is a TrainJob of `trainer.kubeflow.org/v1alpha1` (Kubeflow Trainer 2.2 or later). Each of its pods is one
machine of the run and starts its ranks (:mod:`trainwright.launch.engines.kubernetes.node`).
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trainwright.core.text.messages import RUN_TOKEN, token_environment
from trainwright.launch.outcome.interruption import exit_timeout

API_GROUP, API_VERSION, KIND = "trainer.kubeflow.org", "v1alpha1", "TrainJob"
RUN_LABEL = "trainwright/run"
"""Label of every pod of a run."""
CONFIG_FOLDER = "/etc/trainwright"
"""Mount path of the configuration in pods."""
NODE_MODULE = "trainwright.launch.engines.kubernetes.node"

# Variables for the pods, see `node`.
JOB_NAME, WORKDIR, POD_IP = "TRAINWRIGHT_JOB", "TRAINWRIGHT_WORKDIR", "TRAINWRIGHT_POD_IP"
# Name of the pod group and its container in Kubeflow Trainer's runtimes.
_NODE = "node"
_PATCH_MANAGER = "trainwright/launch"
_LONGEST_NAME = 40  # names derived from it have at most 63 characters
# Seconds that agent and container need to exit after the ranks.
_GRACE_MARGIN = 13


def name_of(cfg: DictConfig) -> str:
    """Return the given job name, or the run name with a suffix that is unique to the run directory."""
    if cfg.launch.job_name is not None:
        return str(cfg.launch.job_name)
    run_dir = Path(cfg.run_dir).absolute()
    digest = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9]+", "-", f"{cfg.name}-{run_dir.name}".lower()).strip("-")
    words = words if words[:1].isalpha() else f"run-{words}"
    return f"{words[: _LONGEST_NAME - len(digest) - 1].strip('-')}-{digest}"


def manifests(cfg: DictConfig, verb: str, config: str) -> list[dict[str, Any]]:
    """Return the objects to create, the ConfigMap first and the job last.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        config: text of its `config.yaml`.
    """
    name = name_of(cfg)
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(cfg, name),
        "data": {"config.yaml": config},
    }
    return [config_map, _train_job(cfg, verb, name)]


def _train_job(cfg: DictConfig, verb: str, name: str) -> dict[str, Any]:
    launch = cfg.launch
    runtime = {"apiGroup": API_GROUP, "kind": launch.runtime_kind, "name": launch.runtime}
    group = {"name": _NODE, "template": {"spec": {"template": _pod_patch(cfg, verb, name)}}}
    return {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": KIND,
        "metadata": _metadata(cfg, name),
        "spec": {
            "runtimeRef": runtime,
            "trainer": _trainer(cfg, verb, name),
            "runtimePatches": [
                {"manager": _PATCH_MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [group]}}}}
            ],
        },
    }


def _trainer(cfg: DictConfig, verb: str, name: str) -> dict[str, Any]:
    """Return the trainer section: command, environment and resources of every pod."""
    resources = _resources(cfg)
    return {
        "image": cfg.launch.image,
        "command": [cfg.launch.python, "-u", "-m", NODE_MODULE],
        "args": [verb],
        "env": _environment(cfg, name),
        "numNodes": cfg.nodes,
        "numProcPerNode": cfg.devices,
        **({"resourcesPerNode": {"limits": resources, "requests": dict(resources)}} if resources else {}),
    }


def _pod_patch(cfg: DictConfig, verb: str, name: str) -> dict[str, Any]:
    """Return what the job adds to the pods of its runtime."""
    launch, volumes = cfg.launch, _volumes(cfg, name)
    spec = {
        "containers": [{"name": _NODE, "volumeMounts": [{"name": volume, **mount} for volume, _, mount in volumes]}],
        "terminationGracePeriodSeconds": _grace(cfg, verb),
        "volumes": [{"name": volume, **source} for volume, source, _ in volumes],
        "nodeSelector": _plain(launch.node_selector),
        "tolerations": [_plain(each) for each in launch.tolerations],
        "serviceAccountName": launch.service_account,
        "imagePullSecrets": [{"name": each} for each in launch.image_pull_secrets],
    }
    metadata = {"labels": _labels(cfg, name), "annotations": _plain(launch.annotations)}
    return {"metadata": _given(metadata), "spec": _given(spec)}


def _metadata(cfg: DictConfig, name: str) -> dict[str, Any]:
    where = {} if cfg.launch.namespace is None else {"namespace": cfg.launch.namespace}
    return {"name": name, **where, "labels": _labels(cfg, name)}


def _labels(cfg: DictConfig, name: str) -> dict[str, str]:
    return {**_plain(cfg.launch.labels), RUN_LABEL: name}


def _environment(cfg: DictConfig, name: str) -> list[dict[str, Any]]:
    launch = cfg.launch
    own: dict[str, str] = {JOB_NAME: name, WORKDIR: launch.mount}
    if RUN_TOKEN not in {*launch.env, *launch.secret_env}:
        own |= token_environment()
    found: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in own.items()]
    found.append({"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    found += [{"name": str(key), "value": str(value)} for key, value in launch.env.items()]
    for key, where in launch.secret_env.items():
        secret, _, entry = str(where).partition("/")
        found.append({"name": str(key), "valueFrom": {"secretKeyRef": {"name": secret, "key": entry}}})
    return found


def gpus_of(cfg: DictConfig) -> int:
    """Return the GPUs per pod."""
    if cfg.launch.gpus is not None:
        return int(cfg.launch.gpus)
    return int(cfg.devices) if cfg.accelerator == "gpu" else 0


def _resources(cfg: DictConfig) -> dict[str, Any]:
    launch = cfg.launch
    found = {"cpu": launch.cpu, "memory": launch.memory, launch.gpu_resource: gpus_of(cfg)}
    return {key: str(value) for key, value in {**_given(found), **launch.resources}.items()}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without empty ones."""
    return {key: value for key, value in values.items() if value}


def _volumes(cfg: DictConfig, name: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return name, source and mount of each volume."""
    more = [(f"volume-{at}", claim, path) for at, (claim, path) in enumerate(_plain(cfg.launch.volumes).items())]
    found: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (volume, {"persistentVolumeClaim": {"claimName": claim}}, {"mountPath": path})
        for volume, claim, path in [("run", cfg.launch.claim, cfg.launch.mount), *more]
    ]
    found.append(("configuration", {"configMap": {"name": name}}, {"mountPath": CONFIG_FOLDER, "readOnly": True}))
    if cfg.launch.shm is not None:
        memory = {"emptyDir": {"medium": "Memory", "sizeLimit": str(cfg.launch.shm)}}
        found.append(("shm", memory, {"mountPath": "/dev/shm"}))  # noqa: S108 - that of the container
    return found


def _grace(cfg: DictConfig, verb: str) -> int:
    """Return the seconds that a pod has to exit, in which its ranks may save."""
    return math.ceil(exit_timeout(cfg, verb)) + _GRACE_MARGIN


def _plain(values: Mapping[Any, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in values.items()}


def text_of(objects: list[dict[str, Any]]) -> str:
    """Return manifests as one yaml file for kubectl."""
    import yaml  # type: ignore[import-untyped]

    # Through JSON, because yaml would write repeated lists as references.
    text: str = yaml.safe_dump_all(json.loads(json.dumps(objects)), sort_keys=False, width=120)
    return text
