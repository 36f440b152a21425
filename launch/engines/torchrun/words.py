"""How the command and the agents of `launch=multinode` talk: a line of JSON each, over standard input and output.

The agents hear over standard input: what they need (:class:`Setup`), where the store is, and signals. So nothing of it
stands on a command line, where other users of the host could read it, and an agent notices when the command is gone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from trainwright.core.text.bounded import ContentError, parse_json
from trainwright.core.text.messages import LONGEST

MARK = "\x1e"
"""In front of a line on standard output that is for the command, and not for people."""


@dataclass(frozen=True)
class Setup:
    """What an agent is told first.

    Attributes:
        run_id: the same for all agents, and for no other run.
        host: of the agent, as the command calls it.
        verb: fit, validate, test or predict.
        run_dir: with `config.yaml`; from the working folder.
        token: that a file in the run directory must hold.
        address: of the host; None = the agent finds it.
        interface: network interface to talk over; None = the one that has the address.
        environment: variables of the ranks.
        versions: of Python and of packages, that must be those of the host.
    """

    run_id: str
    host: str
    verb: str
    run_dir: str
    token: str
    address: str | None = None
    interface: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def to_agent(**message: Any) -> bytes:
    """A line for an agent."""
    return json.dumps(message).encode() + b"\n"


def to_command(**message: Any) -> str:
    """A line for the command."""
    return MARK + json.dumps(message)


def from_agent(line: str) -> dict[str, Any] | None:
    """What an agent says; None: the line is for people."""
    if not line.startswith(MARK):
        return None
    try:
        message = parse_json(line[len(MARK) :].encode(), LONGEST)
    except ContentError:
        return None  # a rank has printed it
    return message if isinstance(message, dict) else None


def versions() -> dict[str, str]:
    """Versions in which the machines of a run must not differ."""
    import platform
    from importlib.metadata import version

    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("trainwright", "torch", "lightning")},
    }
