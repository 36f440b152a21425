"""What `launch=kubernetes` asks of a cluster about a job: made, looked at, deleted.

Answers of the cluster are read as JSON, so that no version of the client's models stands between.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.core.problems import ConfigError
from trainwright.launch.engines.kubernetes.manifest import API_GROUP, API_VERSION, KIND, RUN_LABEL

T = TypeVar("T")

# Plural of the kind in addresses, and the conditions of its two ends.
_PLURAL = "trainjobs"
_ENDS = {"Complete": True, "Failed": False}


class Cluster:
    """What this run has to ask of a cluster.

    Args:
        cfg: the resolved configuration.
        job: the object of the job.
    """

    def __init__(self, cfg: DictConfig, job: dict[str, Any]) -> None:
        from kubernetes import client

        api, namespace = _connect(cfg.launch.context)
        self.namespace: str = cfg.launch.namespace or namespace
        """Of all objects of the run."""
        self.name: str = job["metadata"]["name"]
        """Of the job."""
        self.title = f"{KIND} {self.name}"
        """For a person."""
        self._where = {"group": API_GROUP, "version": API_VERSION, "namespace": self.namespace, "plural": _PLURAL}
        self._core: Any = client.CoreV1Api(api)
        self._objects: Any = client.CustomObjectsApi(api)
        self._refused: type[Exception] = client.ApiException

    def create(self, objects: list[dict[str, Any]]) -> None:
        """Create the job, and the ConfigMap that belongs to it and is deleted with it.

        Args:
            objects: the ConfigMap and the job.

        Raises:
            ConfigError: if the cluster refuses one of them; nothing is left of the other.
        """
        config_map, job = objects
        with self._told(f"{self.title}: "):
            answer = self._objects.create_namespaced_custom_object(**self._where, body=job, _preload_content=False)
            created = _json(answer)
        owner = {
            "apiVersion": job["apiVersion"],
            "kind": KIND,
            "name": self.name,
            "uid": created["metadata"]["uid"],
        }
        owned = config_map | {"metadata": config_map["metadata"] | {"ownerReferences": [owner]}}
        try:
            with self._told(f"the ConfigMap of {self.title}: "):
                self._core.create_namespaced_config_map(self.namespace, owned, _preload_content=False)
        except BaseException:
            self.delete()
            raise

    def state(self) -> tuple[bool | None, str]:
        """Whether the job has ended well (None: it has not ended), and what the cluster says of it.

        Raises:
            RankError: if the job is there no more.
        """
        try:
            job = _json(
                self._objects.get_namespaced_custom_object(**self._where, name=self.name, _preload_content=False)
            )
        except self._refused as error:
            if getattr(error, "status", None) == 404:
                raise RankError(f"{self.title} was deleted by somebody else", 0, None) from None
            raise
        for condition in job.get("status", {}).get("conditions") or []:
            if condition.get("status") != "True":
                continue
            said = ": ".join(part for part in (condition.get("reason"), condition.get("message")) if part)
            if condition["type"] in _ENDS:
                return _ENDS[condition["type"]], said
        return None, ""

    def pods(self) -> list[dict[str, Any]]:
        """The pods of the job, in order of their names."""
        answer = self._core.list_namespaced_pod(
            self.namespace, label_selector=f"{RUN_LABEL}={self.name}", _preload_content=False
        )
        return sorted(_json(answer)["items"], key=lambda pod: str(pod["metadata"]["name"]))

    def answer_to(self, question: Callable[[], T]) -> T | None:
        """What the cluster answers to one of the questions of this class; None: it does not answer just now.

        Raises:
            ApiException: the client's, if the cluster refuses to answer.
        """
        from urllib3.exceptions import HTTPError

        try:
            return question()
        except self._refused as error:
            status = getattr(error, "status", None) or 500
            if status < 500 and status != 429:  # too many questions
                raise
        except (HTTPError, OSError):
            pass
        return None

    def log(self, pod: str) -> Iterator[str]:
        """The lines of a pod's log as they come, to its end."""
        answer = self._core.read_namespaced_pod_log(pod, self.namespace, follow=True, _preload_content=False)
        rest = b""
        try:
            for part in answer.stream(amt=None):
                *lines, rest = (rest + part).split(b"\n")
                yield from (line.decode("utf-8", "replace") for line in lines)
        finally:
            answer.release_conn()
        if rest:
            yield rest.decode("utf-8", "replace")

    def delete(self) -> bool:
        """Delete the job, and with it its pods and its ConfigMap; one that is gone already is no error.

        Returns:
            Whether it goes. Else the job goes on, and a person is told why and what to type.
        """
        try:
            with self._told(""):
                self._delete()
        except ConfigError as error:
            words = f"kubectl delete {_PLURAL} {self.name} --namespace={self.namespace}"
            reason = "; ".join(error.problems)
            print(f"trainwright: {self.title} was not deleted, {reason}; type {words}", file=sys.stderr, flush=True)
            return False
        return True

    def _delete(self) -> None:
        try:
            self._objects.delete_namespaced_custom_object(
                **self._where, name=self.name, propagation_policy="Foreground", _preload_content=False
            )
        except self._refused as error:
            if getattr(error, "status", None) != 404:
                raise

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Say in words what the cluster refuses."""
        from urllib3.exceptions import HTTPError

        try:
            yield
        except self._refused as error:
            raise ConfigError([f"{what}{self._reason(error)}"]) from None
        except (HTTPError, OSError) as error:
            raise ConfigError([f"{what}the cluster cannot be reached ({error}); try kubectl get pods"]) from error

    def _reason(self, error: Any) -> str:
        if error.status == 404:
            return (
                f"the cluster knows no {API_GROUP}/{API_VERSION} {_PLURAL}, or no namespace {self.namespace}; install "
                "Kubeflow Trainer 2.2 or later there, or type another launch.namespace=..."
            )
        if error.status == 409:
            return "one of that name is there already; delete it, or type another launch.job_name=... or run_dir=..."
        body = error.body if isinstance(error.body, str) else ""
        with contextlib.suppress(ValueError):
            body = str(json.loads(body).get("message", body))
        return f"the cluster refuses it ({error.status} {error.reason}): {body}"


def _connect(context: str | None) -> tuple[Any, str]:
    """A client of the cluster that the kubeconfig names, or in a pod of its own cluster, with the namespace to use.

    Raises:
        ConfigError: if there is neither, or no such context.
    """
    from kubernetes import client, config

    try:
        contexts, active = config.list_kube_config_contexts()
        chosen = active if context is None else next((each for each in contexts if each["name"] == context), None)
        if chosen is None:
            there = ", ".join(each["name"] for each in contexts) or "there are none"
            raise ConfigError([f"launch.context={context}: is not in the kubeconfig; contexts: {there}"])
        return config.new_client_from_config(context=chosen["name"]), chosen["context"].get("namespace") or "default"
    except config.ConfigException as error:
        with contextlib.suppress(config.ConfigException):
            config.load_incluster_config()
            return client.ApiClient(), "default"
        raise ConfigError(
            [f"launch.submit=true: no cluster is known here ({error}); set KUBECONFIG, or type launch.submit=false"]
        ) from error


def _json(answer: Any) -> Any:
    return json.loads(answer.data)
