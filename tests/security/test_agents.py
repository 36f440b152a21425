"""Malformed output of pods and messages of members."""

import random
from pathlib import Path

import pytest

from tests.security.attacks import hostile
from trainwright.core.text.bounded import ContentError
from trainwright.launch.engines.kubernetes.submit import MARK, metrics_in, metrics_line
from trainwright.launch.members.mailbox import LeaveReport, Mailbox

ATTEMPTS = 100


def test_100_malformed_lines_of_a_pod_are_output_of_its_ranks() -> None:
    """100 attempts, each behind the mark of a message."""
    rng = random.Random(8)
    lines = [MARK + hostile(rng, end=b"").decode("utf-8", "replace") for _ in range(ATTEMPTS)]
    nonsense = [f"{MARK}{text}" for text in ("3", "[1]", '{"loss": []}', '{"loss": "low"}', '{"loss": {"a": 1}}')]
    assert [line for line in [*lines, *nonsense] if metrics_in(line) is not None] == []
    assert metrics_in(metrics_line({"loss": 0.5, "gain": float("inf")})) == {"loss": 0.5, "gain": float("inf")}


def test_100_malformed_messages_of_members_are_refused(tmp_path: Path) -> None:
    """100 attempts, none of which is read further than a message may be long."""
    rng, mailbox = random.Random(9), Mailbox(tmp_path, create=True)
    for _ in range(ATTEMPTS):
        (tmp_path / "left_0_1.message").write_bytes(b"[" + hostile(rng))
        with pytest.raises(ContentError):
            mailbox.reports(0, [1])
    left = LeaveReport(1, (5,), None)
    mailbox.report_leave(0, left)
    assert mailbox.reports(0, [1]) == [left]
