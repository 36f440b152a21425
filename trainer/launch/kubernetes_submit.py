"""A job of `launch=kubernetes` on its cluster: created, followed to its end, deleted.

Answers of the cluster are read as JSON, so that no version of the client's models stands between.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig

from trainwright.trainer.launch.ending import notices, seconds_to_end, told_to_end
from trainwright.trainer.launch.failure import RankError
from trainwright.trainer.launch.interrupt import Interrupted, interrupted_by_signals
from trainwright.trainer.launch.kubernetes_manifest import JOBSET, PYTORCHJOB, RUN_LABEL, TRAINJOB
from trainwright.trainer.launch.multinode_words import from_agent
from trainwright.trainer.problems import ConfigError

# Plural of the kind in addresses, and the words of its conditions for the two ends.
_PLURALS = {TRAINJOB: "trainjobs", PYTORCHJOB: "pytorchjobs", JOBSET: "jobsets"}
_GOOD_ENDS = {TRAINJOB: "Complete", PYTORCHJOB: "Succeeded", JOBSET: "Completed"}
_BAD_END = "Failed"
_OPERATORS = {TRAINJOB: "Kubeflow Trainer", PYTORCHJOB: "Kubeflow's Training Operator", JOBSET: "JobSet"}
_STARTED = ("Running", "Succeeded", "Failed")
_LAST_LINES = 20
# Seconds that the logs of ended pods may still take, and pods beyond their own time.
_MARGIN_SECONDS = 10.0
_NO_LIMIT_SECONDS = 86400.0


def submit(cfg: DictConfig, verb: str, objects: list[dict[str, Any]]) -> dict[str, float]:
    """Create a job and its configuration, show what its pods say, and wait for its end.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        objects: the ConfigMap and the job.

    Returns:
        The metrics that rank 0 ended with, by name.

    Raises:
        ConfigError: if the cluster cannot be reached, or refuses the job.
        RankError: if the job failed, or was deleted by somebody else.
        Interrupted: if this process was told to end.
    """
    cluster = Cluster(cfg, objects[-1])
    with interrupted_by_signals(notices(cfg)):
        logs = _Logs(cluster)
        try:
            cluster.create(objects)
            print(f"trainwright: {cluster.title} was created in the namespace {cluster.namespace}", file=sys.stderr)
            return _follow(cfg, cluster, logs)
        except Interrupted as interrupted:
            _interrupt(cfg, verb, cluster, logs)
            raise interrupted from None
        finally:
            logs.close()


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
        self.title = f"{job['kind']} {self.name}"
        """For a person."""
        self._kind: str = cfg.launch.job
        self._api_version: str = job["apiVersion"]
        group, _, version = self._api_version.partition("/")
        self._where = {"group": group, "version": version, "namespace": self.namespace, "plural": _PLURALS[self._kind]}
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
            "apiVersion": self._api_version,
            "kind": job["kind"],
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
            if condition["type"] == _GOOD_ENDS[self._kind]:
                return True, said
            if condition["type"] == _BAD_END:
                return False, said
        return None, ""

    def pods(self) -> list[dict[str, Any]]:
        """The pods of the job, in order of their names."""
        answer = self._core.list_namespaced_pod(
            self.namespace, label_selector=f"{RUN_LABEL}={self.name}", _preload_content=False
        )
        return sorted(_json(answer)["items"], key=lambda pod: str(pod["metadata"]["name"]))

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
            words = f"kubectl delete {_PLURALS[self._kind]} {self.name} --namespace={self.namespace}"
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
                f"the cluster knows no {self._api_version} {_PLURALS[self._kind]}, or no namespace {self.namespace}; "
                f"install {_OPERATORS[self._kind]} there, or type another launch.job=... or launch.namespace=..."
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


# ---- following -------------------------------------------------------------------------------------------------------


class _Logs:
    """Shows the logs of pods, each in a thread of its own, and hears what they say to this command.

    Args:
        cluster: of the pods.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._threads: dict[tuple[str, int], threading.Thread] = {}
        self._closed = threading.Event()
        self.metrics: dict[str, float] | None = None
        """That rank 0 ended with, once its pod has said so."""
        self.last_lines: dict[str, deque[str]] = {}
        """Of each pod."""

    def look(self, pods: list[dict[str, Any]]) -> None:
        """Begin to show those pods that have started, and those that have started again."""
        for pod in pods:
            name, status = str(pod["metadata"]["name"]), pod.get("status", {})
            if status.get("phase") not in _STARTED:
                continue
            containers = status.get("containerStatuses") or [{}]
            key = (f"{name} {pod['metadata'].get('uid')}", int(containers[0].get("restartCount", 0)))
            if key not in self._threads:
                thread = threading.Thread(target=self._show, args=(name,), name=f"trainwright-{name}", daemon=True)
                self._threads[key] = thread
                thread.start()

    def finish(self) -> None:
        """Wait until the logs of ended pods have been shown to their ends."""
        end = time.monotonic() + _MARGIN_SECONDS
        for thread in self._threads.values():
            thread.join(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Show no more."""
        self._closed.set()

    def _show(self, pod: str) -> None:
        lines = self.last_lines.setdefault(pod, deque(maxlen=_LAST_LINES))
        shown, tries = 0, 0
        while not self._closed.is_set() and tries < 3:
            tries += 1
            try:
                for at, line in enumerate(self._cluster.log(pod)):
                    if self._closed.is_set():
                        return
                    if at >= shown:  # a connection that was lost begins anew
                        shown = at + 1
                        self._take(pod, line, lines)
                return
            except Exception as error:
                lines.append(f"(its log was lost: {error})")
                self._closed.wait(1.0)

    def _take(self, pod: str, line: str, lines: deque[str]) -> None:
        message = from_agent(line)
        if message is not None:
            self.metrics = {name: float(value) for name, value in json.loads(message["metrics"]).items()}
            return
        lines.append(line)
        print(line if line.startswith("[rank ") else f"[{pod}] {line}", flush=True)


def _follow(cfg: DictConfig, cluster: Cluster, logs: _Logs) -> dict[str, float]:
    while True:
        pods = cluster.pods()
        logs.look(pods)
        good, said = cluster.state()
        if good is not None:
            logs.look(cluster.pods())
            logs.finish()
            if good:
                return logs.metrics or {}
            raise _failure(cfg, cluster, pods, logs, said)
        time.sleep(cfg.launch.poll_seconds)


def _failure(
    cfg: DictConfig, cluster: Cluster, pods: list[dict[str, Any]], logs: _Logs, said: str
) -> RankError | Interrupted:
    codes = {str(pod["metadata"]["name"]): _exit_code(pod) for pod in pods}
    bad: dict[str, int | None] = {name: code for name, code in codes.items() if code}
    told = told_to_end(cfg, dict(enumerate(bad.values())))
    first = next(iter(bad), None)
    own = [code for code in bad.values() if code == 1]
    if told is not None and not own:
        return told
    first = next((name for name, code in bad.items() if code == 1), first)
    text = f"{cluster.title} failed" + (f" ({said})" if said else "")
    if first is not None:
        lines = "\n".join(logs.last_lines.get(first, ()))
        text += f"; {first} ended with exit code {bad[first]}" + (f"\n\nits last lines:\n{lines}" if lines else "")
    return RankError(text, 0, None if first is None else bad[first])


def _exit_code(pod: dict[str, Any]) -> int | None:
    for container in pod.get("status", {}).get("containerStatuses") or []:
        ended = container.get("state", {}).get("terminated")
        if ended is not None:
            return int(ended["exitCode"])
    return None


def _interrupt(cfg: DictConfig, verb: str, cluster: Cluster, logs: _Logs) -> None:
    """Delete the job and show its end, or leave it, as was asked for."""
    if cfg.launch.on_interrupt == "leave":
        print(f"trainwright: {cluster.title} goes on in the namespace {cluster.namespace}", file=sys.stderr)
        return
    if not cluster.delete():
        return
    seconds = seconds_to_end(cfg, verb)
    end = time.monotonic() + (_NO_LIMIT_SECONDS if seconds is None else seconds) + 2 * _MARGIN_SECONDS
    _until(lambda: not cluster.pods(), end, cfg.launch.poll_seconds)
    logs.finish()


def _until(is_so: Callable[[], bool], end: float, pause: float) -> None:
    """Wait until something is so, at most until a moment; a second signal ends the waiting."""
    with contextlib.suppress(Interrupted):
        while not is_so() and time.monotonic() < end:
            time.sleep(pause)
