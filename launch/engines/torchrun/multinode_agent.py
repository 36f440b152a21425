"""One agent of `launch=multinode` as the command has it: a process here, which may be the ssh that has started it."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import queue
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from trainwright.core.config.references import variables_of
from trainwright.core.text.messages import LONGEST
from trainwright.launch.engines.torchrun.hosts import Host
from trainwright.launch.engines.torchrun.words import from_agent

_MODULE = "trainwright.launch.engines.torchrun.host"
_LAST_LINES = 20
# What is left of an agent's output, once its process has ended, is read within so many seconds.
_READ_SECONDS = 3.0
_CONNECTION_LOST, _NOT_FOUND = 255, 127  # of ssh, and of shells


@dataclass(frozen=True)
class Heard:
    """Something of an agent.

    Attributes:
        agent: whose.
        message: what it says to the command; None: its process has ended.
    """

    agent: Agent
    message: dict[str, Any] | None


class Agent:
    """The process that this command has started for one host: an agent, or the ssh that has started one.

    Args:
        host: where.
        command: words that start it.
        heard: where its messages go.
    """

    def __init__(self, host: Host, command: list[str], heard: queue.SimpleQueue[Heard]) -> None:
        self.host = host
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.end: dict[str, Any] | None = None
        """How its ranks ended, once it has said so."""
        self._heard = heard
        # A session of its own: Ctrl-C in the terminal is for this command, which passes it on in order.
        self._process = subprocess.Popen(  # noqa: S603 - the words are the user's own
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"trainwright-{host.name}", daemon=True)
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """Of the process; None as long as it lives."""
        return self._process.poll()

    @property
    def is_cut_off(self) -> bool:
        """Whether it was not the agent that ended, but the connection to it."""
        return self.exit_code == _CONNECTION_LOST and not self.host.is_local

    @property
    def loss(self) -> str:
        """For a person: that it is gone, and how."""
        how = "the connection to it was lost" if self.is_cut_off else f"exit code {self.exit_code}"
        return f"the agent on {self.host.name} is gone ({how})"

    def tell(self, line: bytes) -> None:
        """Say something; one that is gone does not hear it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def let_go(self) -> None:
        """Say that nothing will follow, by which an agent ends whose ranks have ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self, seconds: float) -> bool:
        """Whether the process has ended within so many seconds."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(_READ_SECONDS)
        return True

    def kill(self) -> None:
        """End the process here at once; an agent behind ssh ends as its input does."""
        self.let_go()
        self._process.kill()
        self._process.wait()
        self._reader.join(_READ_SECONDS)

    def _read(self) -> None:
        output = self._process.stdout
        assert output is not None
        with output:
            while raw := output.readline(LONGEST):
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                message = from_agent(line)
                if message is not None:
                    self._heard.put(Heard(self, message))
                elif line:
                    self.last_lines.append(line)
                    print(f"[{self.host.name}] {line}", file=sys.stderr, flush=True)
        self._heard.put(Heard(self, None))


def command_for(cfg: DictConfig, host: Host) -> list[str]:
    """What is run here to have an agent on a host. Nothing that is secret stands in it.

    Args:
        cfg: the resolved configuration.
        host: where.
    """
    there = f"cd {shlex.quote(_workdir(cfg))} && exec {shlex.quote(_python(cfg))} -u -m {_MODULE}"
    return ["sh", "-c", there] if host.is_local else [*cfg.launch.ssh, host.name, there]


def why_not_there(agent: Agent, cfg: DictConfig, has_ended: bool) -> str:
    """Why a host is not there, with what its agent has said.

    Args:
        agent: of the host.
        cfg: the resolved configuration.
        has_ended: whether the agent has; else it has not answered in time.
    """
    name, said = agent.host.name, "\n".join(agent.last_lines)
    words = shlex.join([*cfg.launch.ssh, name, "true"])
    if not has_ended:
        seconds = f"{cfg.launch.connect_timeout:g}"
        text = f"host {name} has not answered within launch.connect_timeout={seconds} s; try `{words}`"
    elif agent.is_cut_off:
        text = f"host {name} cannot be reached: try `{words}`, which must ask for nothing"
    elif agent.exit_code == _NOT_FOUND:
        text = (
            f"host {name} has no {_python(cfg)}: the same Python must be there; type launch.python=... if it is "
            "elsewhere"
        )
    else:
        text = (
            f"host {name}: `cd {_workdir(cfg)} && {_python(cfg)} -m {_MODULE}` ended with exit code "
            f"{agent.exit_code}; folder and Python must be there (launch.workdir=..., launch.python=...)"
        )
    return f"{text}\n{said}" if said else text


def _python(cfg: DictConfig) -> str:
    return str(cfg.launch.python or sys.executable)


def _workdir(cfg: DictConfig) -> str:
    return str(cfg.launch.workdir or os.getcwd())


def environment_of(cfg: DictConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that the ranks of all hosts get.

    Args:
        cfg: the resolved configuration.
        environment: of this process.
    """
    patterns, referred = list(cfg.launch.forward_env), variables_of(cfg)
    forwarded = {
        name: value
        for name, value in environment.items()
        if name in referred or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    return forwarded | {str(name): str(value) for name, value in cfg.launch.env.items()}
