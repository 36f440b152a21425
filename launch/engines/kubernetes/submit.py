"""Submission of a job of `launch=kubernetes`, and live output of its pods until it ends."""

import contextlib
import json
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.core.run.interrupt import DeferredSignals, Interrupted
from trainwright.core.text.bounded import parse_json
from trainwright.core.text.messages import LONGEST
from trainwright.launch.engines.kubernetes.cluster import Cluster
from trainwright.launch.outcome.interruption import exit_timeout, handled_signals, interruption_in

MARK = "\x1e"
"""Prefix of lines for the submitting command, which are not shown."""


def metrics_line(metrics: Mapping[str, float]) -> str:
    """Return the line that reports these metrics."""
    return MARK + json.dumps({name: str(value) for name, value in metrics.items()})  # JSON has no NaN


def metrics_in(line: str) -> dict[str, float] | None:
    """Return the metrics in a line; None = it is output of a rank."""
    if not line.startswith(MARK):
        return None
    try:
        said = parse_json(line[len(MARK) :].encode(), LONGEST)
        return {name: float(value) for name, value in said.items()}
    except (AttributeError, TypeError, ValueError):
        return None


_STARTED = ("Running", "Succeeded", "Failed")
_LAST_LINES = 20
# Pods whose logs are shown at a time; each takes a thread and a connection.
_MOST_SHOWN = 64
# Seconds for the rest of the logs of ended pods, and for pods beyond their own grace period.
_MARGIN_SECONDS = 10.0
# Seconds for which a cluster may not respond, as during an update.
_SILENCE_SECONDS = 600.0


def submit(cfg: DictConfig, verb: str, objects: list[dict[str, Any]]) -> dict[str, float]:
    """Create a job and its configuration, show the logs of its pods, and wait for its end.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        objects: the ConfigMap and the job.

    Returns:
        The final metrics of rank 0 by name.

    Raises:
        ConfigError: if the cluster cannot be reached, or refuses the job.
        RankError: if the job failed, or was deleted externally.
        Interrupted: if this process was interrupted.
    """
    cluster = Cluster(cfg, objects[-1])
    with DeferredSignals(handled_signals(cfg)):
        logs = _Logs(cluster)
        try:
            cluster.create(objects)
            print(f"trainwright: {cluster.title} was created in the namespace {cluster.namespace}", file=sys.stderr)
            return _wait_for_end(cfg, cluster, logs)
        except Interrupted as interrupted:
            _interrupt(cfg, verb, cluster, logs)
            raise interrupted from None
        finally:
            logs.close()


# ---- following -------------------------------------------------------------------------------------------------------


class _Waiting(NamedTuple):
    """A pod whose log is to be shown; smaller ones come first."""

    goes_on: bool
    numbers: list[int]  # in its name
    start: tuple[str, int]  # pod and its number of restarts


class _Logs:
    """Live output of the logs of pods, each in a thread of its own, and the metrics that they report.

    Of more than 64 pods the others wait until one has ended. Ended pods come first, because they show the cause, then
    those with the lowest numbers.

    Args:
        cluster: of the pods.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._threads: list[threading.Thread] = []
        self._begun: set[tuple[str, int]] = set()
        self._waiting: dict[str, _Waiting] = {}  # by pod
        self._closed = threading.Event()
        self.metrics: dict[str, float] | None = None
        """Final metrics of rank 0, once its pod has reported them."""
        self.last_lines: dict[str, deque[str]] = {}
        """Of each pod."""

    def look(self, pods: list[dict[str, Any]]) -> None:
        """Show the logs of pods that have (re)started."""
        for pod in pods:
            name, status = str(pod["metadata"]["name"]), pod.get("status", {})
            if status.get("phase") not in _STARTED:
                continue
            containers = status.get("containerStatuses") or [{}]
            start = (f"{name} {pod['metadata'].get('uid')}", int(containers[0].get("restartCount", 0)))
            if start not in self._begun:
                numbers = [int(number) for number in re.findall(r"\d+", name)]
                self._waiting[name] = _Waiting(status["phase"] == "Running", numbers, start)
        self._begin()

    def finish(self) -> None:
        """Wait until the logs of ended pods have been shown completely."""
        end = time.monotonic() + _MARGIN_SECONDS
        while time.monotonic() < end:
            self._begin()
            if not self._threads:
                return
            self._threads[0].join(0.1)

    def close(self) -> None:
        """Stop showing."""
        self._closed.set()

    def _begin(self) -> None:
        """Start to show waiting pods, as many as allowed."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        room = _MOST_SHOWN - len(self._threads)
        for name in sorted(self._waiting, key=lambda pod: self._waiting[pod])[:room]:
            self._begun.add(self._waiting.pop(name).start)
            thread = threading.Thread(target=self._show, args=(name,), name=f"trainwright-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _show(self, pod: str) -> None:
        lines = self.last_lines.setdefault(pod, deque(maxlen=_LAST_LINES))
        shown, tries = 0, 0
        while not self._closed.is_set() and tries < 3:
            tries += 1
            try:
                for at, line in enumerate(self._cluster.log(pod)):
                    if self._closed.is_set():
                        return
                    if at >= shown:  # a lost connection restarts from the beginning
                        shown = at + 1
                        self._take(pod, line, lines)
                return
            except Exception as error:
                lines.append(f"(its log was lost: {error})")
                self._closed.wait(1.0)

    def _take(self, pod: str, line: str, lines: deque[str]) -> None:
        metrics = metrics_in(line)
        if metrics is not None:
            self.metrics = metrics
            return
        lines.append(line)
        print(line if line.startswith("[rank ") else f"[{pod}] {line}", flush=True)


def _wait_for_end(cfg: DictConfig, cluster: Cluster, logs: _Logs) -> dict[str, float]:
    answered = time.monotonic()
    while True:
        pods = cluster.query(cluster.pods)
        state = None if pods is None else cluster.query(cluster.state)
        if pods is not None and state is not None:
            answered = time.monotonic()
            logs.look(pods)
            good, said = state
            if good is not None:
                return _end(cfg, cluster, logs, good, said)
        elif time.monotonic() - answered > _SILENCE_SECONDS:
            raise RankError(
                f"the cluster has not responded for {_SILENCE_SECONDS:g} s, and {cluster.title} may still be running; "
                f"try kubectl get pods --namespace={cluster.namespace}",
                0,
                None,
            )
        time.sleep(cfg.launch.poll_seconds)


def _end(cfg: DictConfig, cluster: Cluster, logs: _Logs, good: bool, said: str) -> dict[str, float]:
    """Return the metrics of a job that has succeeded.

    Raises:
        RankError, Interrupted: if it has not.
    """
    pods = cluster.query(cluster.pods) or []
    logs.look(pods)
    logs.finish()
    if good:
        return logs.metrics or {}
    raise _failure(cfg, cluster, pods, logs, said)


def _failure(
    cfg: DictConfig, cluster: Cluster, pods: list[dict[str, Any]], logs: _Logs, said: str
) -> RankError | Interrupted:
    codes = {str(pod["metadata"]["name"]): _exit_code(pod) for pod in pods}
    bad: dict[str, int | None] = {name: code for name, code in codes.items() if code}
    interruption = interruption_in(cfg, dict(enumerate(bad.values())))
    own = [name for name, code in bad.items() if code == 1]
    if interruption is not None and not own:
        return interruption
    first = next(iter([*own, *bad]), None)
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
    """Delete the job and show its end, or leave it, as configured."""
    if cfg.launch.on_interrupt == "leave":
        print(f"trainwright: {cluster.title} keeps running in the namespace {cluster.namespace}", file=sys.stderr)
        return
    if not cluster.delete():
        return
    end = time.monotonic() + exit_timeout(cfg, verb) + 2 * _MARGIN_SECONDS
    with contextlib.suppress(Interrupted):  # a second signal ends the wait
        while cluster.query(cluster.pods) != [] and time.monotonic() < end:
            time.sleep(cfg.launch.poll_seconds)
    logs.finish()
