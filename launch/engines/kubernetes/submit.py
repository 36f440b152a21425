"""A job of `launch=kubernetes` on its cluster, from its making to its end: what its pods say is shown meanwhile."""

from __future__ import annotations

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
from trainwright.launch.outcome.ending import notices, seconds_to_end, told_to_end

MARK = "\x1e"
"""In front of a line that is for the command, and not for people."""


def metrics_line(metrics: Mapping[str, float]) -> str:
    """Return the line that says these metrics."""
    return MARK + json.dumps({name: str(value) for name, value in metrics.items()})  # JSON has no NaN


def metrics_in(line: str) -> dict[str, float] | None:
    """Return the metrics that a line says; None: it is output of a rank."""
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
# Seconds that the logs of ended pods may still take, and pods beyond their own time.
_MARGIN_SECONDS = 10.0
_NO_LIMIT_SECONDS = 86400.0
# Seconds for which a cluster may be silent: one that is updated answers again.
_SILENCE_SECONDS = 600.0


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
    with DeferredSignals(notices(cfg)):
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


# ---- following -------------------------------------------------------------------------------------------------------


class _Waiting(NamedTuple):
    """A pod whose log is to be shown; those that compare as less come first."""

    goes_on: bool
    numbers: list[int]  # in its name
    start: tuple[str, int]  # pod and its number of restarts


class _Logs:
    """Shows the logs of pods, each in a thread of its own, and hears what they say to this command.

    Of more than 64 pods the others wait until one has ended. Those that have ended come first, since they tell why,
    then those with the lowest numbers.

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
            start = (f"{name} {pod['metadata'].get('uid')}", int(containers[0].get("restartCount", 0)))
            if start not in self._begun:
                numbers = [int(number) for number in re.findall(r"\d+", name)]
                self._waiting[name] = _Waiting(status["phase"] == "Running", numbers, start)
        self._begin()

    def finish(self) -> None:
        """Wait until the logs of ended pods have been shown to their ends."""
        end = time.monotonic() + _MARGIN_SECONDS
        while time.monotonic() < end:
            self._begin()
            if not self._threads:
                return
            self._threads[0].join(0.1)

    def close(self) -> None:
        """Show no more."""
        self._closed.set()

    def _begin(self) -> None:
        """Begin to show as many of those that wait as there is room for."""
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
                    if at >= shown:  # a connection that was lost begins anew
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


def _follow(cfg: DictConfig, cluster: Cluster, logs: _Logs) -> dict[str, float]:
    answered = time.monotonic()
    while True:
        pods = cluster.answer_to(cluster.pods)
        state = None if pods is None else cluster.answer_to(cluster.state)
        if pods is not None and state is not None:
            answered = time.monotonic()
            logs.look(pods)
            good, said = state
            if good is not None:
                return _end(cfg, cluster, logs, good, said)
        elif time.monotonic() - answered > _SILENCE_SECONDS:
            raise RankError(
                f"the cluster has not answered for {_SILENCE_SECONDS:g} s, and {cluster.title} may go on; try kubectl "
                f"get pods --namespace={cluster.namespace}",
                0,
                None,
            )
        time.sleep(cfg.launch.poll_seconds)


def _end(cfg: DictConfig, cluster: Cluster, logs: _Logs, good: bool, said: str) -> dict[str, float]:
    """The metrics of a job that has ended well.

    Raises:
        RankError, Interrupted: if it has not.
    """
    pods = cluster.answer_to(cluster.pods) or []
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
    with contextlib.suppress(Interrupted):  # a second signal ends the waiting
        while cluster.answer_to(cluster.pods) != [] and time.monotonic() < end:
            time.sleep(cfg.launch.poll_seconds)
    logs.finish()
