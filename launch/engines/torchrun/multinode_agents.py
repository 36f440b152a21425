"""The agents of a run of `launch=multinode`: started on every host, waited for until they are there, heard, let go."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trainwright.core.problems import ConfigError
from trainwright.core.text.messages import token_environment
from trainwright.launch.engines.torchrun.hosts import LOCAL, Host, hosts_of
from trainwright.launch.engines.torchrun.multinode_agent import Agent, Heard, command_for, environment_of, why_not_there
from trainwright.launch.engines.torchrun.words import Setup, to_agent, versions
from trainwright.launch.ranks.follow import Follower

MARGIN_SECONDS = 3.0
"""Beyond what an agent gives itself to end."""
# Seconds between two looks at the logs of the ranks.
_LOOK_SECONDS = 0.3


class Agents:
    """The agents of a run, from their start to the end of the last. As a context manager it leaves none behind.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        token: that lies in the run directory, by which an agent knows that it sees the same one.

    Attributes:
        hosts: of the configuration.
        of_hosts: the agents that count, in the order of their hosts.
    """

    def __init__(self, cfg: DictConfig, verb: str, token: str) -> None:
        self.hosts = hosts_of(cfg)
        self.of_hosts: list[Agent] = []
        self._cfg = cfg
        self._verb = verb
        self._token = token
        self._run_id = f"{cfg.name}-{secrets.token_hex(8)}"
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._logs = Follower()
        self._logs.add_ranks(Path(cfg.run_dir), range(cfg.devices * cfg.nodes))

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.of_hosts:
            agent.let_go()
        end = time.monotonic() + MARGIN_SECONDS  # of all: they end side by side
        for agent in self.of_hosts:
            if not agent.wait(max(0.0, end - time.monotonic())):
                agent.kill()
        self._logs.finish()

    def start_all(self) -> None:
        """Start an agent on every host."""
        for host in self.hosts:
            self.of_hosts.append(self._start(host))

    def replace(self, lost: Agent) -> Agent:
        """Start an agent anew that is gone; it takes the place of the other."""
        agent = self._start(lost.host)
        self.of_hosts[self.of_hosts.index(lost)] = agent
        return agent

    def next(self, seconds: float) -> Heard | None:
        """What is heard next, at most so many seconds from now; the logs are shown meanwhile."""
        end = time.monotonic() + max(seconds, 0.0)
        while True:
            with contextlib.suppress(queue.Empty):
                return self._heard.get(timeout=max(0.001, min(_LOOK_SECONDS, end - time.monotonic())))
            self._logs.poll()
            if time.monotonic() >= end:
                return None

    def ready(self, agents: list[Agent]) -> list[dict[str, Any]]:
        """What these agents say when they are there.

        Args:
            agents: that were just started.

        Raises:
            ConfigError: with what is wrong with each host.
        """
        end = time.monotonic() + self._cfg.launch.connect_timeout
        found: dict[Agent, dict[str, Any]] = {}
        wrong: dict[Agent, str] = {}
        while len(found) + len(wrong) < len(agents):
            heard = self.next(end - time.monotonic())
            if heard is None:
                late = [agent for agent in agents if agent not in found and agent not in wrong]
                wrong |= {agent: why_not_there(agent, self._cfg, has_ended=False) for agent in late}
            elif heard.agent in found or heard.agent in wrong:
                continue
            elif heard.message is None:
                heard.agent.wait(MARGIN_SECONDS)
                wrong[heard.agent] = why_not_there(heard.agent, self._cfg, has_ended=True)
            elif "problem" in heard.message:
                wrong[heard.agent] = f"host {heard.agent.host.name}: {heard.message['problem']}"
            elif "ready" in heard.message:
                found[heard.agent] = heard.message
        if wrong:
            raise ConfigError([wrong[agent] for agent in agents if agent in wrong])
        return [found[agent] for agent in agents]

    def answer(self, agent: Agent, word: str) -> Any:
        """What an agent answers, under that word.

        Raises:
            ConfigError: if it does not in time, or an agent is gone meanwhile.
        """
        end = time.monotonic() + self._cfg.launch.connect_timeout
        while (heard := self.next(end - time.monotonic())) is not None:
            if heard.agent is agent and heard.message is not None and word in heard.message:
                return heard.message[word]
            if heard.message is None:
                heard.agent.wait(MARGIN_SECONDS)
                raise ConfigError([why_not_there(heard.agent, self._cfg, has_ended=True)])
        raise ConfigError([why_not_there(agent, self._cfg, has_ended=False)])

    def _start(self, host: Host) -> Agent:
        agent = Agent(host, command_for(self._cfg, host), self._heard)
        own = all(each.is_local for each in self.hosts)
        setup = Setup(
            self._run_id,
            host.name,
            self._verb,
            str(self._cfg.run_dir),
            self._token,
            address="127.0.0.1" if own and host.name == LOCAL else None,
            interface=self._cfg.launch.interface,
            environment=token_environment() | environment_of(self._cfg, os.environ),
            versions=versions(),
        )
        agent.tell(to_agent(**asdict(setup)))
        return agent
