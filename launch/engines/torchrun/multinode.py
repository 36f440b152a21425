"""`launch=multinode`: one run on several hosts, whose agents this command starts over ssh and watches.

Each host gets an agent of torchrun (:mod:`trainwright.launch.engines.torchrun.host`), and the agents meet at a store
that listens on one address alone. torch's own would listen on every interface, and what is kept there is a pickle.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError, first_failure
from trainwright.core.failures.records import read_result, write_whole
from trainwright.core.problems import ConfigError
from trainwright.core.run.interrupt import Interrupted, interrupted_by_signals
from trainwright.launch.engines.torchrun.host import PROBE
from trainwright.launch.engines.torchrun.hosts import ANY, endpoint_of, host_problems, is_mine
from trainwright.launch.engines.torchrun.multinode_agent import Agent, Heard
from trainwright.launch.engines.torchrun.multinode_agents import MARGIN_SECONDS, Agents
from trainwright.launch.engines.torchrun.words import to_agent
from trainwright.launch.outcome.ending import A_WEEK, notices, seconds_to_end, told_to_end
from trainwright.launch.outcome.ends import empty_ends, ends_folder

# Seconds between two looks at whether agents have ended that were told to.
_LOOK_SECONDS = 0.3
# Hosts of a run fail together: the one to blame may be heard of second.
_TOGETHER_SECONDS = 2.0


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
    with (
        interrupted_by_signals(notices(cfg)),
        contextlib.ExitStack() as stores,  # closed last: agents meet there until they end
        Agents(cfg, verb, token) as agents,
    ):
        return _Run(cfg, verb, agents, stores).run()


class _Run:
    """A run, from the meeting of its agents to the end of the last.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
        agents: not yet started.
        stores: takes the store where the agents meet, if it is of this process; closed after the run.
    """

    def __init__(self, cfg: DictConfig, verb: str, agents: Agents, stores: contextlib.ExitStack) -> None:
        self._cfg = cfg
        self._verb = verb
        self._agents = agents
        self._stores = stores
        self._run_dir = Path(cfg.run_dir)
        self._place: list[Any] = []
        self._restarts = 0
        self._lost: Agent | None = None

    def run(self) -> dict[str, float]:
        """Start the agents and wait for their end.

        Returns:
            The metrics that rank 0 ended with, by name.
        """
        try:
            self._agents.start_all()
            self._meet()
            self._wait()
        except Interrupted as interrupted:
            return self._pass_on(interrupted)
        self._raise_failure()
        return self._result()

    # ---- beginning ---------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Wait until all hosts are there, open the store, and have the agents begin."""
        from trainwright.launch.ranks.rendezvous import LocalStore  # imports torch, while the agents do

        agents = self._agents.of_hosts
        listen, told, port = self._endpoint(self._agents.ready(agents))
        if is_mine(listen) and (listen not in ANY or is_mine(told)):
            try:
                store = self._stores.enter_context(LocalStore(port, listen, told))
            except OSError as error:
                raise ConfigError([f"launch.rdzv_endpoint={listen}:{port}: {error.strerror}"]) from error
            self._place = [store.address, store.port]
        else:
            agents[0].tell(to_agent(store=[listen, told, port]))
            self._place = self._agents.answer(agents[0], "store")
        for agent in agents:
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
                    f"nothing tells by which address the other hosts reach {self._agents.hosts[0].name}; type "
                    "launch.rdzv_endpoint=<address>, or launch.interface=<interface>"
                ]
            )
        return asked.address or first, first, asked.port

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait until the ranks of all hosts have ended, or one has failed and all are to end."""
        while self._any_runs:
            heard = self._agents.next(A_WEEK)
            if heard is None or heard.agent not in self._agents.of_hosts:
                continue
            if _take_end(heard):
                assert heard.agent.end is not None
                if heard.agent.end["codes"] or heard.agent.end["signal"]:
                    self._hear_who_else()
                    self._end_others(self._cfg.launch.grace_seconds)
                    return
            elif _is_lost(heard) and not self._replace(heard.agent):
                self._lost = heard.agent
                self._end_others(self._cfg.launch.grace_seconds)
                return

    @property
    def _any_runs(self) -> bool:
        return any(agent.end is None for agent in self._agents.of_hosts)

    def _hear_who_else(self) -> None:
        """Hear of those that end together with the first, one of which may be to blame."""
        end = time.monotonic() + _TOGETHER_SECONDS
        while self._any_runs and time.monotonic() < end:
            heard = self._agents.next(end - time.monotonic())
            if heard is None:
                return
            if not _take_end(heard) and _is_lost(heard):
                self._lost = heard.agent

    def _replace(self, lost: Agent) -> bool:
        """Start an agent anew that is gone, where the run goes on; whether it does."""
        lost.wait(MARGIN_SECONDS)
        limit = self._cfg.launch.max_restarts
        while limit is None or self._restarts < limit:
            self._restarts += 1
            _say(f"{lost.loss}; it is started again")
            time.sleep(min(60.0, self._cfg.launch.backoff_seconds * 2 ** min(self._restarts - 1, 10)))
            agent = self._agents.replace(lost)
            try:
                self._agents.ready([agent])
            except ConfigError as error:
                agent.kill()
                _say(str(error))
                lost = agent
                if self._go_on_without(lost):
                    return True
            else:
                agent.tell(to_agent(begin=self._place))
                return True
        return self._go_on_without(lost)

    def _go_on_without(self, lost: Agent) -> bool:
        """Leave a host out, where enough others are left; whether they are."""
        least = self._cfg.launch.min_nodes
        if least is None or len(self._agents.of_hosts) - 1 < least:
            return False
        _say(f"{lost.loss}; the run goes on without it")
        self._agents.of_hosts.remove(lost)
        return True

    # ---- ending ------------------------------------------------------------------------------------------------------

    def _end_others(self, seconds: float | None, number: int = signal.SIGTERM) -> None:
        """Have those agents end that have not, and wait for them."""
        for agent in self._agents.of_hosts:
            if agent.end is None:
                agent.tell(to_agent(signal=int(number), seconds=seconds))
        end = time.monotonic() + (A_WEEK if seconds is None else seconds + MARGIN_SECONDS)
        while any(agent.end is None and agent.exit_code is None for agent in self._agents.of_hosts):
            heard = self._agents.next(min(_LOOK_SECONDS, end - time.monotonic()))
            if heard is not None:
                _take_end(heard)
            if time.monotonic() >= end:
                return
        while (heard := self._agents.next(0.0)) is not None:
            _take_end(heard)

    def _pass_on(self, interrupted: Interrupted) -> dict[str, float]:
        """Pass a signal on to all ranks, and wait for their end; a second signal ends them at once."""
        try:
            self._end_others(seconds_to_end(self._cfg, self._verb, interrupted.number), interrupted.number)
        except Interrupted:
            self._end_others(0.0)
        ended = self._ends
        if len(ended) == len(self._agents.hosts) and not any(end["signal"] or end["codes"] for end in ended):
            return self._result()  # they were through already
        if interrupted.number in notices(self._cfg) and self._verb == "fit":
            failure = self._failure()
            if failure is not None and failure.is_cause:
                raise failure
            raise Interrupted(interrupted.number, self._cfg.preemption.exit_code)
        raise interrupted

    def _raise_failure(self) -> None:
        """Raise what has ended the run before its end, if anything has."""
        told, failure, lost = told_to_end(self._cfg, self._codes), self._failure(), self._lost
        if failure is not None and failure.is_cause:
            raise failure
        if lost is not None:
            said = "\n".join(lost.last_lines)
            raise RankError(f"{lost.loss}; the others were ended" + (f"\n\n{said}" if said else ""), 0, None)
        if told is not None:
            raise told
        if failure is not None:
            raise failure

    @property
    def _ends(self) -> list[dict[str, Any]]:
        """What agents have said of the ends of their ranks."""
        return [agent.end for agent in self._agents.of_hosts if agent.end is not None]

    @property
    def _codes(self) -> dict[int, int | None]:
        return {int(rank): code for end in self._ends for rank, code in end["codes"].items()}

    def _failure(self) -> RankError | None:
        """What the ranks say of their end; None: nothing bad."""
        codes, folder = self._codes, ends_folder(self._run_dir)
        if not any(codes.values()) and not any(folder.glob("*.json")):
            return None
        everybody: dict[int, int | None] = dict.fromkeys(range(self._cfg.devices * self._cfg.nodes))
        return first_failure(folder, everybody | codes, self._run_dir)

    def _result(self) -> dict[str, float]:
        try:
            return read_result(ends_folder(self._run_dir))
        except FileNotFoundError:
            return {}  # the user's own code has ended the ranks well


def _take_end(heard: Heard) -> bool:
    """Remember how the ranks of an agent ended, if that is what it says; whether it is."""
    if heard.message is None or "end" not in heard.message:
        return False
    heard.agent.end = heard.message["end"]
    return True


def _is_lost(heard: Heard) -> bool:
    """Whether an agent is gone that has not said how its ranks ended."""
    return heard.message is None and heard.agent.end is None


def _say(text: str) -> None:
    print(f"trainwright: {text}", file=sys.stderr, flush=True)
