"""Calls of `launch=kubernetes` to the API of a cluster: create, query, delete.

Responses are read as JSON, independent of the client's model versions.
"""

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

# Plural of the kind in URLs, and the conditions that end a job.
_PLURAL = "trainjobs"
_ENDS = {"Complete": True, "Failed": False}


class Cluster:
    """Client of the cluster of one run.

    Args:
        cfg: the resolved configuration.
        job: the job's manifest.
    """

    def __init__(self, cfg: DictConfig, job: dict[str, Any]) -> None:
        from kubernetes import client

        api, namespace = _connect(cfg.launch.context)
        self.namespace: str = cfg.launch.namespace or namespace
        """Namespace of all objects of the run."""
        self.name: str = job["metadata"]["name"]
        """Name of the job."""
        self.title = f"{KIND} {self.name}"
        """Title of the job in messages."""
        self._where = {"group": API_GROUP, "version": API_VERSION, "namespace": self.namespace, "plural": _PLURAL}
        self._core: Any = client.CoreV1Api(api)
        self._objects: Any = client.CustomObjectsApi(api)
        self._refused: type[Exception] = client.ApiException

    def create(self, objects: list[dict[str, Any]]) -> None:
        """Create the job, and its ConfigMap, which is deleted with it.

        Args:
            objects: the ConfigMap and the job.

        Raises:
            ConfigError: if the cluster refuses one of them; the other is not left behind.
        """
        config_map, job = objects
        with self._translated(f"{self.title}: "):
            answer = self._objects.create_namespaced_custom_object(**self._where, body=job, _preload_content=False)
            created = _json(answer)
        owner = {"apiVersion": job["apiVersion"], "kind": KIND, "name": self.name, "uid": created["metadata"]["uid"]}
        owned = config_map | {"metadata": config_map["metadata"] | {"ownerReferences": [owner]}}
        try:
            with self._translated(f"the ConfigMap of {self.title}: "):
                self._core.create_namespaced_config_map(self.namespace, owned, _preload_content=False)
        except BaseException:
            self.delete()
            raise

    def state(self) -> tuple[bool | None, str]:
        """Return whether the job succeeded (None = it has not ended), and the cluster's reason.

        Raises:
            RankError: if the job does not exist any more.
        """
        try:
            job = _json(
                self._objects.get_namespaced_custom_object(**self._where, name=self.name, _preload_content=False)
            )
        except self._refused as error:
            if getattr(error, "status", None) == 404:
                raise RankError(f"{self.title} was deleted externally", 0, None) from None
            raise
        for condition in job.get("status", {}).get("conditions") or []:
            if condition.get("status") == "True" and condition["type"] in _ENDS:
                said = ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
                return _ENDS[condition["type"]], said
        return None, ""

    def pods(self) -> list[dict[str, Any]]:
        """Return the pods of the job, sorted by name."""
        answer = self._core.list_namespaced_pod(
            self.namespace, label_selector=f"{RUN_LABEL}={self.name}", _preload_content=False
        )
        return sorted(_json(answer)["items"], key=lambda pod: str(pod["metadata"]["name"]))

    def query(self, question: Callable[[], T]) -> T | None:
        """Return the result of one of this class's queries; None = the cluster does not respond at present.

        Raises:
            ApiException: the client's, if the cluster refuses.
        """
        from urllib3.exceptions import HTTPError

        try:
            return question()
        except self._refused as error:
            status = getattr(error, "status", None) or 500
            if status < 500 and status != 429:  # too many requests
                raise
        except (HTTPError, OSError):
            pass
        return None

    def log(self, pod: str) -> Iterator[str]:
        """Yield the lines of a pod's log as they arrive, to its end."""
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
        """Delete the job with its pods and its ConfigMap; a missing job is no error.

        Returns:
            Whether it is being deleted. If not, the job continues, and a message says why and what to type.
        """
        try:
            with self._translated(""):
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
    def _translated(self, what: str) -> Iterator[None]:
        """Turn refusals of the cluster into ConfigError."""
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
            return "the name is taken; delete that object, or type another launch.job_name=... or run_dir=..."
        body = error.body if isinstance(error.body, str) else ""
        with contextlib.suppress(ValueError):
            body = str(json.loads(body).get("message", body))
        return f"the cluster refuses it ({error.status} {error.reason}): {body}"


def _connect(context: str | None) -> tuple[Any, str]:
    """Return a client for the kubeconfig's cluster, or in a pod for its own, and the default namespace.

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
            [f"launch.submit=true: no cluster is configured ({error}); set KUBECONFIG, or type launch.submit=false"]
        ) from error


def _json(answer: Any) -> Any:
    return json.loads(answer.data)
