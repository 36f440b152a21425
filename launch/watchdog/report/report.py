"""Text of a hang report: the cause first, then every rank, the user's lines first."""

import time
from collections.abc import Sequence

from trainwright.launch.watchdog.calls import Call
from trainwright.launch.watchdog.evidence import Evidence
from trainwright.launch.watchdog.report.stacks import Frame, Thread
from trainwright.launch.watchdog.report.verdict import HangVerdict

_CALLS_SHOWN = 8


def report_of(verdict: HangVerdict, ranks: Sequence[Evidence]) -> str:
    """Return the full report.

    Args:
        verdict: the rank at fault.
        ranks: evidence about each rank of this machine.
    """
    culprit_first = sorted(ranks, key=lambda one: (one.rank != verdict.rank, one.rank))
    parts = [
        f"Hang: {verdict.sentence}",
        f"Found {time.strftime('%Y-%m-%d %H:%M:%S')}. The ranks of this machine:",
        "\n".join(_row(one) for one in sorted(ranks, key=lambda one: one.rank)),
        *(_users_lines(one) for one in culprit_first),
        *(_whole(one) for one in culprit_first),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def first_lines(report: str) -> str:
    """Return the part of a report for the terminal: the cause, and a line per rank."""
    return "\n".join(part.rstrip() for part in report.split("\n\n")[:3])


def _row(one: Evidence) -> str:
    progress = one.progress
    if not progress.running:
        return f"  rank {one.rank}: its run has ended (process {progress.process})"
    return (
        f"  rank {one.rank}: phase {progress.phase}, step {progress.step}, micro-batch {progress.micro_batches}, no "
        f"progress for {one.stalled:.1f} s (limit {one.limit:.1f} s), {one.wait.words} (process {progress.process})"
    )


def _users_lines(one: Evidence) -> str:
    thread = one.thread
    if thread is None:
        return ""
    if not thread.users:
        return f"Rank {one.rank} is in none of your lines."
    lines = "\n".join(map(_line, thread.users))
    return f"Rank {one.rank} is in your lines (innermost first)\n{lines}"


def _whole(one: Evidence) -> str:
    parts = [f"---- rank {one.rank} " + "-" * 60]
    if one.answer is not None:
        groups = one.answer.groups
        parts += [_thread(thread) for thread in one.answer.threads]
        calls = one.answer.calls[-_CALLS_SHOWN:]
        if calls:
            names = {name: str(group) for name, group in groups.items()}
            parts.append("last collective calls (oldest first)\n" + "\n".join(_call(call, names) for call in calls))
    else:
        parts.append(f"does not answer; state of its process: {one.state or 'gone'}")
    if one.stacks:
        parts.append("stacks, written by the interpreter (innermost first)\n" + one.stacks.rstrip())
    parts += [
        f"child process {child.process} ({child.name}), state {child.state}"
        + (f"\n{child.stacks.rstrip()}" if child.stacks else "")
        for child in one.children
    ]
    return "\n".join(parts)


def _thread(thread: Thread) -> str:
    name = "main thread" if thread.is_main else f"thread {thread.name or '(not of Python)'}"
    state = f" (state {thread.state})" if thread.state else ""
    return f"{name}{state}, innermost first\n" + "\n".join(map(_line, thread.frames))


def _line(frame: Frame) -> str:
    return f"  {frame.file}:{frame.line} in {frame.function}: {frame.text}".rstrip(": ")


def _call(call: Call, groups: dict[str, str]) -> str:
    state = "PENDING" if call.pending else "done"
    return f"  {call} of {groups.get(call.group, f'group {call.group!r}')}: {state}, begun {call.seconds:.1f} s ago"
