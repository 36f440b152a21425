"""`launch=multinode`: one run on several hosts, whose agents this command starts over ssh and watches.

Each host gets an agent of torchrun (:mod:`trainwright.trainer.launch.multinode_host`), and the agents meet at a store
that listens on one address alone. torch's own would listen on every interface, and what is kept there is a pickle.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import queue
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from trainwright.trainer.launch.ending import notices, seconds_to_end, told_to_end
from trainwright.trainer.launch.ends import empty_ends, ends_folder
from trainwright.trainer.launch.failure import RankError, first_failure
from trainwright.trainer.launch.follow import Follower
from trainwright.trainer.launch.hosts import ANY, LOCAL, Host, endpoint_of, host_problems, hosts_of, is_mine
from trainwright.trainer.launch.interrupt import Interrupted, interrupted_by_signals
from trainwright.trainer.launch.multinode_host import PROBE
from trainwright.trainer.launch.multinode_words import Setup, from_agent, to_agent, versions
from trainwright.trainer.launch.records import read_result, write_whole
from trainwright.trainer.problems import ConfigError

if TYPE_CHECKING:
    from trainwright.trainer.launch.rendezvous import LocalStore

_MODULE = "trainwright.trainer.launch.multinode_host"
# Seconds between two looks at the logs of the ranks.
_LOOK_SECONDS = 0.3
# Beyond what an agent gives itself.
_MARGIN_SECONDS = 3.0
# Hosts of a run fail together: the one to blame may be heard of second.
_TOGETHER_SECONDS = 2.0
_A_WEEK = 7 * 86400.0
_LAST_LINES = 20
_CONNECTION_LOST, _NOT_FOUND = 255, 127  # of ssh, and of shells


def problems(cfg: DictConfig, verb: str) -> list[str]:
    """What is impossible about `launch`, with what to type instead.

    Args:
        cfg: resolved, with `run_dir` decided.
        verb: fit, validate, test or predict.
    """
    return list(host_problems(cfg))


def launch(cfg: DictConfig, verb: str) -> dict[str, float]:
    """Start the ranks on all hosts, show what they print, and wait for their end.

    Args:
        cfg: the resolved configuration, already written to its run directory.
        verb: fit, validate, test or predict.

    Returns:
        The metrics that rank 0 ended with, by name.

    Raises:
        ConfigError: if a host cannot be reached, or the run cannot be there; no rank was started.
        RankError: if a rank failed or an agent was lost, and there was no other attempt; all others have ended.
        Interrupted: if this process was told to end; all ranks have ended.
    """
    token = secrets.token_hex(16)
    write_whole(empty_ends(Path(cfg.run_dir)) / PROBE, token)
    with interrupted_by_signals(notices(cfg)), _Run(cfg, verb, token) as run:
        return run.run()


@dataclass(frozen=True)
class _Heard:
    """Something of an agent.

    Attributes:
        agent: whose.
        message: what it says to the command; None: its process has ended.
    """

    agent: _Agent
    message: dict[str, Any] | None


class _Agent:
    """The process that this command has started for one host: an agent, or the ssh that has started one.

    Args:
        host: where.
        command: words that start it.
        heard: where its messages go.
    """

    def __init__(self, host: Host, command: list[str], heard: queue.SimpleQueue[_Heard]) -> None:
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
        self._reader.join(_MARGIN_SECONDS)
        return True

    def kill(self) -> None:
        """End the process here at once; an agent behind ssh ends as its input does."""
        self.let_go()
        self._process.kill()
        self._process.wait()
        self._reader.join(_MARGIN_SECONDS)

    def _read(self) -> None:
        output = self._process.stdout
        assert output is not None
        with output:
            for raw in output:
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                message = from_agent(line)
                if message is not None:
                    self._heard.put(_Heard(self, message))
                elif line:
                    self.last_lines.append(line)
                    print(f"[{self.host.name}] {line}", file=sys.stderr, flush=True)
        self._heard.put(_Heard(self, None))


class _Run:
    """The agents of a run, from their start to the end of the last.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        token: that lies in the run directory.
    """

    def __init__(self, cfg: DictConfig, verb: str, token: str) -> None:
        self._cfg = cfg
        self._verb = verb
        self._token = token
        self._run_id = f"{cfg.name}-{secrets.token_hex(8)}"
        self._run_dir = Path(cfg.run_dir)
        self._hosts = hosts_of(cfg)
        self._heard: queue.SimpleQueue[_Heard] = queue.SimpleQueue()
        self._agents: list[_Agent] = []
        self._store: LocalStore | None = None
        self._place: list[Any] = []
        self._restarts = 0
        self._lost: _Agent | None = None
        self._logs = Follower()
        self._logs.add_ranks(self._run_dir, range(cfg.devices * cfg.nodes))

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents:
            agent.let_go()
        for agent in self._agents:
            if not agent.wait(_MARGIN_SECONDS):
                agent.kill()
        self._logs.finish()
        if self._store is not None:
            self._store.close()

    def run(self) -> dict[str, float]:
        """Start the agents and wait for their end.

        Returns:
            The metrics that rank 0 ended with, by name.
        """
        try:
            for host in self._hosts:
                self._agents.append(self._start(host))
            self._meet()
            self._wait()
        except Interrupted as interrupted:
            return self._pass_on(interrupted)
        self._raise_failure()
        return self._result()

    # ---- beginning ---------------------------------------------------------------------------------------------------

    def _start(self, host: Host) -> _Agent:
        agent = _Agent(host, command_for(self._cfg, host), self._heard)
        interface, own = self._cfg.launch.interface, all(each.is_local for each in self._hosts)
        setup = Setup(
            self._run_id,
            host.name,
            self._verb,
            str(self._run_dir),
            self._token,
            address="127.0.0.1" if own and host.name == LOCAL else None,
            interface=interface,
            environment=environment_of(self._cfg, os.environ),
            versions=versions(),
        )
        agent.tell(to_agent(**asdict(setup)))
        return agent

    def _meet(self) -> None:
        """Wait until all hosts are there, open the store, and have the agents begin."""
        from trainwright.trainer.launch.rendezvous import LocalStore  # imports torch, while the agents do

        ready = self._ready(self._agents)
        listen, told, port = self._endpoint(ready)
        if is_mine(listen) and (listen not in ANY or is_mine(told)):
            try:
                self._store = LocalStore(port, listen, told)
            except OSError as error:
                raise ConfigError([f"launch.rdzv_endpoint={listen}:{port}: {error.strerror}"]) from error
            self._place = [self._store.address, self._store.port]
        else:
            self._agents[0].tell(to_agent(store=[listen, told, port]))
            self._place = self._hear(self._agents[0], "store")
        for agent in self._agents:
            agent.tell(to_agent(begin=self._place))

    def _endpoint(self, ready: list[dict[str, Any]]) -> tuple[str, str, int | None]:
        """Address to listen at, how the others call it, and the port.

        Raises:
            ConfigError: if nothing tells an address of the first host.
        """
        asked, first = endpoint_of(self._cfg), ready[0]["address"]
        if first is None:  # this machine, as the others see it
            first = next((each["client"] for each in ready if each["client"] is not None), None)
        if asked.address is not None and asked.address not in ANY:
            return asked.address, asked.address, asked.port
        if first is None:
            raise ConfigError(
                [
                    f"nothing tells by which address the other hosts reach {self._hosts[0].name}; type "
                    "launch.rdzv_endpoint=<address>, or launch.interface=<interface>"
                ]
            )
        return asked.address or first, first, asked.port

    def _ready(self, agents: list[_Agent]) -> list[dict[str, Any]]:
        """What these agents say when they are there.

        Raises:
            ConfigError: with what is wrong with each host.
        """
        end = time.monotonic() + self._cfg.launch.connect_timeout
        found: dict[_Agent, dict[str, Any]] = {}
        wrong: dict[_Agent, str] = {}
        while len(found) + len(wrong) < len(agents):
            heard = self._next(end - time.monotonic())
            if heard is None:
                late = [agent for agent in agents if agent not in found and agent not in wrong]
                wrong |= {agent: self._why(agent, has_ended=False) for agent in late}
            elif heard.agent in found or heard.agent in wrong:
                continue
            elif heard.message is None:
                heard.agent.wait(_MARGIN_SECONDS)
                wrong[heard.agent] = self._why(heard.agent, has_ended=True)
            elif "problem" in heard.message:
                wrong[heard.agent] = f"host {heard.agent.host.name}: {heard.message['problem']}"
            elif "ready" in heard.message:
                found[heard.agent] = heard.message
        if wrong:
            raise ConfigError([wrong[agent] for agent in agents if agent in wrong])
        return [found[agent] for agent in agents]

    def _hear(self, agent: _Agent, word: str) -> Any:
        end = time.monotonic() + self._cfg.launch.connect_timeout
        while (heard := self._next(end - time.monotonic())) is not None:
            if heard.agent is agent and heard.message is not None and word in heard.message:
                return heard.message[word]
            if heard.message is None:
                heard.agent.wait(_MARGIN_SECONDS)
                raise ConfigError([self._why(heard.agent, has_ended=True)])
        raise ConfigError([self._why(agent, has_ended=False)])

    def _why(self, agent: _Agent, has_ended: bool) -> str:
        """Why a host is not there."""
        name, said = agent.host.name, "\n".join(agent.last_lines)
        words = shlex.join([*self._cfg.launch.ssh, name, "true"])
        if not has_ended:
            seconds = f"{self._cfg.launch.connect_timeout:g}"
            text = f"host {name} has not answered within launch.connect_timeout={seconds} s; try `{words}`"
        elif agent.exit_code == _CONNECTION_LOST and not agent.host.is_local:
            text = f"host {name} cannot be reached: try `{words}`, which must ask for nothing"
        elif agent.exit_code == _NOT_FOUND:
            text = (
                f"host {name} has no {self._python}: the same Python must be there; type launch.python=... if it is "
                "elsewhere"
            )
        else:
            text = (
                f"host {name}: `cd {self._workdir} && {self._python} -m {_MODULE}` ended with exit code "
                f"{agent.exit_code}; folder and Python must be there (launch.workdir=..., launch.python=...)"
            )
        return f"{text}\n{said}" if said else text

    @property
    def _python(self) -> str:
        return str(self._cfg.launch.python or sys.executable)

    @property
    def _workdir(self) -> str:
        return str(self._cfg.launch.workdir or os.getcwd())

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def _next(self, seconds: float) -> _Heard | None:
        """What is heard next, at most so many seconds from now; the logs are shown meanwhile."""
        end = time.monotonic() + max(seconds, 0.0)
        while True:
            with contextlib.suppress(queue.Empty):
                return self._heard.get(timeout=max(0.001, min(_LOOK_SECONDS, end - time.monotonic())))
            self._logs.poll()
            if time.monotonic() >= end:
                return None

    def _wait(self) -> None:
        """Wait until the ranks of all hosts have ended, or one has failed and all are to end."""
        while any(agent.end is None for agent in self._agents):
            heard = self._next(_A_WEEK)
            if heard is None or heard.agent not in self._agents:
                continue
            if heard.message is not None and "end" in heard.message:
                heard.agent.end = heard.message["end"]
                if heard.agent.end["codes"] or heard.agent.end["signal"]:
                    self._hear_who_else()
                    self._end_others(self._cfg.launch.grace_seconds)
                    return
            elif heard.message is None and heard.agent.end is None and not self._replace(heard.agent):
                self._lost = heard.agent
                self._end_others(self._cfg.launch.grace_seconds)
                return

    def _hear_who_else(self) -> None:
        """Hear of those that end together with the first, one of which may be to blame."""
        end = time.monotonic() + _TOGETHER_SECONDS
        while any(agent.end is None for agent in self._agents) and time.monotonic() < end:
            heard = self._next(end - time.monotonic())
            if heard is None:
                return
            if heard.message is not None and "end" in heard.message:
                heard.agent.end = heard.message["end"]
            elif heard.message is None and heard.agent.end is None:
                self._lost = heard.agent

    def _replace(self, lost: _Agent) -> bool:
        """Start an agent anew that is gone, where the run goes on; whether it does."""
        lost.wait(_MARGIN_SECONDS)
        limit = self._cfg.launch.max_restarts
        while limit is None or self._restarts < limit:
            self._restarts += 1
            print(f"trainwright: {self._loss(lost)}; it is started again", file=sys.stderr, flush=True)
            time.sleep(min(60.0, self._cfg.launch.backoff_seconds * 2 ** min(self._restarts - 1, 10)))
            agent = self._start(lost.host)
            self._agents[self._agents.index(lost)] = agent
            try:
                self._ready([agent])
            except ConfigError as error:
                agent.kill()
                print(f"trainwright: {error}", file=sys.stderr, flush=True)
                lost = agent
                if self._go_on_without(lost):
                    return True
            else:
                agent.tell(to_agent(begin=self._place))
                return True
        return self._go_on_without(lost)

    def _go_on_without(self, lost: _Agent) -> bool:
        """Leave a host out, where enough others are left; whether they are."""
        least = self._cfg.launch.min_nodes
        if least is None or len(self._agents) - 1 < least:
            return False
        print(f"trainwright: {self._loss(lost)}; the run goes on without it", file=sys.stderr, flush=True)
        self._agents.remove(lost)
        return True

    def _loss(self, agent: _Agent) -> str:
        is_cut = agent.exit_code == _CONNECTION_LOST and not agent.host.is_local
        how = "the connection to it was lost" if is_cut else f"exit code {agent.exit_code}"
        return f"the agent on {agent.host.name} is gone ({how})"

    # ---- ending ------------------------------------------------------------------------------------------------------

    def _end_others(self, seconds: float | None, number: int = signal.SIGTERM) -> None:
        """Have those agents end that have not, and wait for them."""
        for agent in self._agents:
            if agent.end is None:
                agent.tell(to_agent(signal=int(number), seconds=seconds))
        patience = _A_WEEK if seconds is None else seconds + _MARGIN_SECONDS
        end = time.monotonic() + patience
        while any(agent.end is None and agent.exit_code is None for agent in self._agents):
            heard = self._next(min(_LOOK_SECONDS, end - time.monotonic()))
            if heard is not None and heard.message is not None and "end" in heard.message:
                heard.agent.end = heard.message["end"]
            if time.monotonic() >= end:
                return
        while (heard := self._next(0.0)) is not None:
            if heard.message is not None and "end" in heard.message:
                heard.agent.end = heard.message["end"]

    def _pass_on(self, interrupted: Interrupted) -> dict[str, float]:
        """Pass a signal on to all ranks, and wait for their end; a second signal ends them at once."""
        try:
            self._end_others(seconds_to_end(self._cfg, self._verb, interrupted.number), interrupted.number)
        except Interrupted:
            self._end_others(0.0)
        ended = [agent.end for agent in self._agents if agent.end is not None]
        if len(ended) == len(self._hosts) and not any(end["signal"] or end["codes"] for end in ended):
            return self._result()  # they were through already
        if interrupted.number in notices(self._cfg) and self._verb == "fit":
            failure = self._failure()
            if failure is not None and failure.is_cause:
                raise failure
            raise Interrupted(interrupted.number, self._cfg.preemption.exit_code)
        raise interrupted

    def _raise_failure(self) -> None:
        """Raise what has ended the run before its end, if anything has."""
        told, failure, lost = told_to_end(self._cfg, self._codes()), self._failure(), self._lost
        if failure is not None and failure.is_cause:
            raise failure
        if lost is not None:
            said = "\n".join(lost.last_lines)
            raise RankError(f"{self._loss(lost)}; the others were ended" + (f"\n\n{said}" if said else ""), 0, None)
        if told is not None:
            raise told
        if failure is not None:
            raise failure

    def _codes(self) -> dict[int, int | None]:
        ended = [agent.end["codes"] for agent in self._agents if agent.end is not None]
        return {int(rank): code for codes in ended for rank, code in codes.items()}

    def _failure(self) -> RankError | None:
        """What the ranks say of their end; None: nothing bad."""
        codes, folder = self._codes(), ends_folder(self._run_dir)
        if not any(codes.values()) and not any(folder.glob("*.json")):
            return None
        everybody: dict[int, int | None] = dict.fromkeys(range(self._cfg.devices * self._cfg.nodes))
        return first_failure(folder, everybody | codes, self._run_dir)

    def _result(self) -> dict[str, float]:
        try:
            return read_result(ends_folder(self._run_dir))
        except FileNotFoundError:
            return {}  # the user's own code has ended the ranks well


def command_for(cfg: DictConfig, host: Host) -> list[str]:
    """What is run here to have an agent on a host. Nothing that is secret stands in it.

    Args:
        cfg: the resolved configuration.
        host: where.
    """
    python, folder = cfg.launch.python or sys.executable, cfg.launch.workdir or os.getcwd()
    there = f"cd {shlex.quote(folder)} && exec {shlex.quote(python)} -u -m {_MODULE}"
    return ["sh", "-c", there] if host.is_local else [*cfg.launch.ssh, host.name, there]


def environment_of(cfg: DictConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that the ranks of all hosts get.

    Args:
        cfg: the resolved configuration.
        environment: of this process.
    """
    patterns = list(cfg.launch.forward_env)
    forwarded = {
        name: value
        for name, value in environment.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    return forwarded | {str(name): str(value) for name, value in cfg.launch.env.items()}
