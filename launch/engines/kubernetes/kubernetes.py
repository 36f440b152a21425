"""`launch=kubernetes`: the run as a job of pods, written as a manifest or submitted.

The configuration is composed and checked here and passed in a ConfigMap; pods compose nothing. See
:mod:`trainwright.launch.engines.kubernetes.manifest` for the objects, and
:mod:`trainwright.launch.engines.kubernetes.node` for the program of the pods.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from omegaconf import DictConfig

from trainwright.core.run.run_directory import CONFIG_FILE
from trainwright.launch.engines.kubernetes.manifest import RUN_LABEL, gpus_of, manifests, name_of, text_of

MANIFEST_FILE = "kubernetes.yaml"
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = ("PET_", "TRAINWRIGHT_")
_LONGEST_NAME = 50  # operators append a suffix, and 63 characters are allowed


def problems(cfg: DictConfig) -> list[str]:
    """Return the problems of `launch`, with what to type instead.

    Args:
        cfg: resolved, with `run_dir` decided.
    """
    found = [*_name_problems(cfg), *_gpu_problems(cfg), *_path_problems(cfg), *_variable_problems(cfg)]
    if cfg.launch.submit and importlib.util.find_spec("kubernetes") is None:
        install = "pip install 'trainwright[kubernetes]'"
        found.append(f"launch.submit=true: kubernetes is not installed; type {install}, or launch.submit=false")
    return found


def _name_problems(cfg: DictConfig) -> Iterator[str]:
    launch = cfg.launch
    named = {"job_name": launch.job_name, "namespace": launch.namespace, "claim": launch.claim}
    for key, given in named.items():
        if given is not None and (_NAME.fullmatch(str(given)) is None or len(str(given)) > _LONGEST_NAME):
            allowed = f"at most {_LONGEST_NAME} lower-case letters, digits and -, starting with a letter"
            yield f"launch.{key}={given}: must be {allowed}"
    for key in ("cpu", "memory", "shm"):
        if launch[key] is not None and _QUANTITY.fullmatch(str(launch[key])) is None:
            yield f"launch.{key}={launch[key]}: must be a quantity of Kubernetes, like 16, 500m or 64Gi"


def _gpu_problems(cfg: DictConfig) -> Iterator[str]:
    gpus = gpus_of(cfg)
    if gpus and cfg.accelerator == "cpu":
        yield f"launch.gpus={gpus} with accelerator=cpu: they would be idle; leave launch.gpus out"
    elif not gpus and cfg.accelerator == "gpu":
        yield f"accelerator=gpu with launch.gpus=0: the pods have none; type launch.gpus={cfg.devices}, or leave it out"
    elif gpus and isinstance(cfg.devices, int) and gpus < cfg.devices:
        given = f"devices={cfg.devices} with launch.gpus={gpus}"
        yield f"{given}: each rank of a pod needs one; type launch.gpus={cfg.devices}, or devices={gpus}"


def _path_problems(cfg: DictConfig) -> Iterator[str]:
    mount, run_dir = PurePosixPath(cfg.launch.mount), PurePosixPath(cfg.run_dir)
    if not mount.is_absolute():
        yield f"launch.mount={mount}: must be a path from the root, like /workspace"
    elif ".." in run_dir.parts or (run_dir.is_absolute() and mount not in run_dir.parents):
        yield (
            f"run_dir={run_dir} is not below launch.mount={mount}, where the pods mount the volume of "
            f"launch.claim={cfg.launch.claim}; type a relative run_dir=..., like runs/mine, or another launch.mount=..."
        )
    for claim, path in cfg.launch.volumes.items():
        if not PurePosixPath(str(path)).is_absolute():
            yield f"launch.volumes.{claim}={path}: must be a path from the root, like /data"


def _variable_problems(cfg: DictConfig) -> Iterator[str]:
    for group in ("env", "secret_env"):
        for name in cfg.launch[group]:
            if _VARIABLE.fullmatch(str(name)) is None:
                yield f"launch.{group}.{name}: is not a variable name"
            elif str(name).startswith(_RESERVED):
                yield f"launch.{group}.{name}: is set by the launcher of the pods; leave it out"
    for name, where in cfg.launch.secret_env.items():
        secret, slash, key = str(where).partition("/")
        if not (secret and slash and key):
            yield f"launch.secret_env.{name}={where}: must be secret/key, like wandb/api-key"


# ---- the run ---------------------------------------------------------------------------------------------------------


def launch(cfg: DictConfig, verb: str) -> dict[str, float] | None:
    """Write the manifest into the run directory; with `launch.submit`, create the job and follow it to its end.

    Args:
        cfg: the resolved configuration, already written to its run directory.
        verb: fit, validate, test or predict.

    Returns:
        The final metrics of rank 0 by name; None = only the manifest was written.

    Raises:
        ConfigError: if the cluster cannot be reached, or refuses the job.
        RankError: if the job failed.
        Interrupted: if this process was interrupted; the job was deleted, unless `launch.on_interrupt` leaves it.
    """
    run_dir = Path(cfg.run_dir)
    objects = manifests(cfg, verb, (run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    path = run_dir / MANIFEST_FILE
    path.write_text(text_of(objects), encoding="utf-8")
    if not cfg.launch.submit:
        print(_kubectl_commands(cfg, path), flush=True)
        return None
    from trainwright.launch.engines.kubernetes.submit import submit

    return submit(cfg, verb, objects)


def _kubectl_commands(cfg: DictConfig, path: Path) -> str:
    given = {"context": cfg.launch.context, "namespace": cfg.launch.namespace}
    options = "".join(f" --{name}={value}" for name, value in given.items() if value is not None)
    file = shlex.quote(str(path))
    return "\n".join(
        (
            f"manifest:      {path}",
            f"submit it:     kubectl{options} apply -f {file}",
            f"follow it:     kubectl{options} logs -f --max-log-requests={cfg.nodes} -l {RUN_LABEL}={name_of(cfg)}",
            f"end it:        kubectl{options} delete -f {file}",
        )
    )
