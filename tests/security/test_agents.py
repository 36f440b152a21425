"""What ranks print, or leave in the folder of messages, instead of what agents and members say."""

from __future__ import annotations

import queue
import random
import sys
from pathlib import Path

import pytest

from tests.security.attacks import SECONDS, hostile
from trainwright.core.text.bounded import ContentError
from trainwright.launch.engines.torchrun.hosts import Host
from trainwright.launch.engines.torchrun.multinode_agent import Agent, Heard
from trainwright.launch.engines.torchrun.words import MARK, to_command
from trainwright.launch.members.mailbox import Left, Mailbox

ATTEMPTS = 100


def test_100_malformed_lines_of_an_agent_are_output_of_its_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """100 attempts, each behind the mark of a message; the message after them is heard."""
    rng = random.Random(8)
    lines = [MARK.encode() + hostile(rng).removesuffix(b"\n") + b"\n" for _ in range(ATTEMPTS)]
    printed = tmp_path / "printed"
    printed.write_bytes(b"".join(lines) + to_command(ready=True).encode() + b"\n")
    heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
    show = "import shutil, sys; shutil.copyfileobj(open(sys.argv[1], 'rb'), sys.stdout.buffer)"
    agent = Agent(Host("local"), [sys.executable, "-c", show, str(printed)], heard)
    try:
        messages = list(iter(lambda: heard.get(timeout=SECONDS).message, None))
    finally:
        agent.kill()
    assert [message for message in messages if message.get("ready")] == [{"ready": True}]
    assert "[local]" in capfd.readouterr().err


def test_100_malformed_messages_of_members_are_refused(tmp_path: Path) -> None:
    """100 attempts, none of which is read further than a message may be long."""
    rng, mailbox = random.Random(9), Mailbox(tmp_path, create=True)
    for _ in range(ATTEMPTS):
        (tmp_path / "left_0_1.message").write_bytes(b"[" + hostile(rng))
        with pytest.raises(ContentError):
            mailbox.left(0, [1])
    left = Left(1, (5,), None)
    mailbox.say_left(0, left)
    assert mailbox.left(0, [1]) == [left]
