"""Verdict about a hang: the rank that blocks the others.

A rank that waits for others is not at fault; the rank it waits for may be. So suspects do not wait for communication
and have exceeded their limit. If all ranks wait for each other, their calls do not match: then the calls of each
process group are compared by number.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.core.run import phases
from trainwright.launch.watchdog.boxes import OUTSIDE_OF_STEPS, PHASES, SETUP
from trainwright.launch.watchdog.calls import Call, Group
from trainwright.launch.watchdog.evidence import COMMUNICATION, DEBUGGER, HALTED, KERNEL, SILENT, Evidence
from trainwright.launch.watchdog.report.stacks import Frame

# States of a worker process in which it cannot run.
_BLOCKED = {"T": "is stopped by a signal (SIGSTOP)", "D": "waits in the kernel", "t": "is held by a debugger"}
# Certain causes take precedence over likely ones.
_CERTAINTY = (HALTED, KERNEL, SILENT)
# Calls whose inputs are the same on every rank; for others only the name must match.
_ALIKE = frozenset({"all_reduce", "all_gather", "_all_gather_base", "reduce_scatter", "_reduce_scatter_base"})
# Last calls of a failed rank that are compared with those of others.
_MAX_COMPARED = 30
# The user's functions that Lightning and data loaders call.
_ENTRY = re.compile(r"\.(on_\w+|\w+_step|configure_\w+|\w+_dataloader|__getitem__|__getitems__|__iter__|__next__)$")
# Phases that have no place in the order of a step.
_AT_ANY_TIME = (SETUP, phases.SAVING, *OUTSIDE_OF_STEPS)


@dataclass(frozen=True)
class HangVerdict:
    """The rank at fault.

    Attributes:
        rank: to blame, as far as known; it may be on another machine.
        ends: a rank of this machine to kill; ``rank`` where possible.
        sentence: for the report.
        reason: a short form without numbers, equal for repetitions of the same hang.
    """

    rank: int
    ends: int
    sentence: str
    reason: str


@dataclass(frozen=True)
class _Waiting:
    """A call in which a rank has waited for too long."""

    evidence: Evidence
    call: Call
    group: Group


def judge(ranks: Sequence[Evidence], seen_before: bool = False) -> HangVerdict | None:
    """Return which rank blocks the others; ``None`` = none, or not known yet.

    Args:
        ranks: every rank of this machine that has started.
        seen_before: whether the previous check gave the same suspects; only then ranks of other machines are blamed.
    """
    running = [one for one in ranks if one.progress.running]
    if any(one.wait.kind == DEBUGGER for one in running):
        return None  # a person debugs it
    over = [one for one in running if one.exceeds_limit]
    waiting = _waiting(over)
    verdict = _mismatch(waiting, ranks) or _stalled_rank(over, running)
    if verdict is not None:
        return verdict
    if not over or any(one.wait.kind != COMMUNICATION for one in running):
        return None  # a rank that they wait for is busy, and may be for longer
    return _all_waiting(over, waiting, ranks) if seen_before else None


def _waiting(ranks: Sequence[Evidence]) -> list[_Waiting]:
    """Return the oldest pending call of each rank that waits for communication."""
    found = []
    for one in ranks:
        if one.answer is None or one.wait.kind != COMMUNICATION:
            continue
        call = next((call for call in one.pending if call.group in one.answer.groups), None)
        if call is not None:
            found.append(_Waiting(one, call, one.answer.groups[call.group]))
    return found


def differing_calls(ranks: Sequence[Evidence]) -> str | None:
    """Return where the calls of failed ranks stopped matching; ``None`` = not known.

    Args:
        ranks: with their reports at the time of the error.
    """
    answered = [one for one in ranks if one.answer is not None]
    recent = [
        _Waiting(one, call, one.answer.groups[call.group])
        for one in answered
        if one.answer is not None
        for call in one.answer.calls[-_MAX_COMPARED:]
        if call.group in one.answer.groups
    ]
    verdict = _mismatch(recent, answered)
    return None if verdict is None else verdict.sentence


def last_call(one: Evidence) -> str:
    """Return the last call of a failed rank as text; ``""`` = not known."""
    if one.answer is None or not one.answer.calls:
        return ""
    call = one.answer.calls[-1]
    place = "" if one.place is None else f" in {one.place.place}"
    return f"rank {one.rank} was in {call} of {one.answer.groups.get(call.group, call.group)}{place}"


# ---- a rank that does not wait for others --------------------------------------------------------------------------


def _stalled_rank(over: Sequence[Evidence], running: Sequence[Evidence]) -> HangVerdict | None:
    blamed = [one for one in over if one.wait.kind != COMMUNICATION]
    if not blamed:
        return None
    missed = {rank for one in _waiting(over) for rank in one.group.ranks}

    def blame(one: Evidence) -> tuple[bool, bool, float]:
        return one.wait.kind in _CERTAINTY, one.rank in missed, one.stalled

    culprit = max(blamed, key=blame)
    # A stopped process is found before any rank has waited for too long.
    witnesses = running if culprit.wait.kind == HALTED else over
    sentence = f"{_missing(culprit, witnesses)}{_activity(culprit)}"
    return HangVerdict(culprit.rank, culprit.rank, sentence, _location(culprit))


def _missing(culprit: Evidence, witnesses: Sequence[Evidence]) -> str:
    """Return the call that the culprit has not joined, as text."""
    waiting = _waiting(witnesses)
    absent = [one for one in waiting if culprit.rank in one.group.ranks and _is_absent(culprit, one.call)]
    if absent:
        longest = max(absent, key=lambda one: one.call.seconds)
        return (
            f"rank {culprit.rank} has not joined {longest.call} of {longest.group}, in which "
            f"{_listed([one.evidence.rank for one in absent if one.call.number == longest.call.number])} "
            f"waited for {longest.call.seconds:.0f} s; "
        )
    others = [one for one in witnesses if one.wait.kind == COMMUNICATION]
    if not others:
        return ""
    longest_one = max(others, key=lambda one: one.stalled)
    place = longest_one.place
    where = f" in {place.place}" if place is not None else ""
    return f"rank {longest_one.rank} has waited for other ranks for {longest_one.stalled:.0f} s{where}; "


def _is_absent(one: Evidence, call: Call) -> bool:
    """Return whether a rank has not made a call; assumed for a rank that does not answer."""
    if one.answer is None:
        return True
    return max((made.number for made in one.answer.calls if made.group == call.group), default=0) < call.number


def _activity(one: Evidence) -> str:
    """Return what a rank is doing, from its line of code to what it waits for."""
    blocked = "; ".join(
        f"worker process {child.process} {_BLOCKED[child.state]}" for child in one.children if child.state in _BLOCKED
    )
    return f"rank {one.rank} is {_location(one)}{f': {blocked}' if blocked else ''}"


def _location(one: Evidence) -> str:
    place, phase = one.place, one.progress.phase
    where = f"in phase {phase}" if place is None else f"in {place.place}{_hook_text(one, place)} (phase {phase})"
    return f"{where}, {one.wait.words}"


def _hook_text(one: Evidence, place: Frame) -> str:
    """Return the hook or step of the module, callback or data set that the line belongs to."""
    users = () if one.thread is None else one.thread.users
    entry = next((frame for frame in users if _ENTRY.search(frame.function)), None)
    if entry is None or entry == place:
        return ""
    return f", within {entry.function}"


# ---- ranks that wait for each other ---------------------------------------------------------------------------------


def _mismatch(waiting: Sequence[_Waiting], ranks: Sequence[Evidence]) -> HangVerdict | None:
    """Find ranks that made different calls with the same number."""
    for one in waiting:
        made = {
            other.rank: call
            for other in ranks
            if other.rank in one.group.ranks and (call := _call(other, one.call)) is not None
        }
        forms = Counter(_form(call) for call in made.values())
        if len(forms) < 2:
            continue
        usual, _ = forms.most_common(1)[0]
        odd = [rank for rank, call in made.items() if _form(call) != usual]
        if len(forms) == 2 and 2 * len(odd) == len(made):
            odd = _ranks_ahead(ranks, made)  # a tie: as many ranks have made one call as the other
        culprit = odd[0]
        others = [rank for rank in sorted(made) if rank not in odd]
        return HangVerdict(
            culprit,
            culprit,
            f"rank {culprit} has called {_name(made[culprit])}{_where(ranks, culprit)} as number {one.call.number} of "
            f"{one.group}, where {_listed(others, 'called')} {_name(made[others[0]])}{_where(ranks, others[0])}: "
            "one of them left a call out, made one too many, or gave another size or type",
            f"called {made[culprit].name}{_where(ranks, culprit)} where others called {made[others[0]].name}",
        )
    return None


def _call(one: Evidence, like: Call) -> Call | None:
    calls = () if one.answer is None else one.answer.calls
    return next((call for call in calls if call.group == like.group and call.number == like.number), None)


def _form(call: Call) -> tuple[str, str]:
    return call.name, call.what if call.name in _ALIKE else ""


def _name(call: Call) -> str:
    return f"{call.name}{call.what}"


def _where(ranks: Sequence[Evidence], rank: int) -> str:
    one = next((one for one in ranks if one.rank == rank), None)
    place = None if one is None else one.place
    return "" if one is None or place is None else f" in {place.place}{_hook_text(one, place)}"


def _ranks_ahead(ranks: Sequence[Evidence], among: dict[int, Call]) -> list[int]:
    """Break a tie: ranks ahead of the others have left something out; without one, return all but the first's form."""
    ahead = {one.rank: _place_in_run(one) for one in ranks if one.rank in among}
    most = max(ahead.values())
    furthest = sorted(rank for rank, place in ahead.items() if place == most)
    if len(furthest) < len(ahead):
        return furthest
    first = _form(among[min(among)])
    return [rank for rank in sorted(among) if _form(among[rank]) != first]


def _place_in_run(one: Evidence) -> tuple[int, int, int]:
    phase = one.progress.phase
    order = len(PHASES) if phase in _AT_ANY_TIME else PHASES.index(phase)
    return one.progress.step, one.progress.micro_batches, order


def _all_waiting(
    over: Sequence[Evidence], waiting: Sequence[_Waiting], ranks: Sequence[Evidence]
) -> HangVerdict | None:
    """Judge ranks that all wait: for one that has ended, for another machine, or for each other in different calls."""
    here = {one.rank: one for one in ranks}
    longest_first = sorted(waiting, key=lambda one: one.call.seconds, reverse=True)
    absent = [
        (one, here[rank])
        for one in longest_first
        for rank in one.group.ranks
        if rank in here and _is_absent(here[rank], one.call)
    ]
    alone = [one for one in longest_first if not _was_made_before(one)]
    if alone and len(alone) < len(longest_first) and any(one is alone[0] for one, _ in absent):
        return _extra_call(alone[0], longest_first)
    if absent:
        # A rank ahead of the others has left out the call that they wait for.
        return _skipped_call(*max(absent, key=lambda pair: (not pair[1].progress.running, _place_in_run(pair[1]))))
    for one in longest_first:
        others = [rank for rank in one.group.ranks if rank not in here]
        # A rank there may be saving; only its own monitor knows its limit.
        if others and one.evidence.stalled > one.evidence.slow_limit:
            return HangVerdict(
                others[0],
                one.evidence.rank,
                f"no rank of this machine is to blame: {_listed(others, 'not joined')} {_waited(one)}, on another "
                "machine",
                f"waits for other machines in {one.call.name}",
            )
        if others:
            return None
    longest = max(over, key=lambda one: one.stalled)
    return HangVerdict(
        longest.rank,
        longest.rank,
        "all ranks wait for each other; " + "; ".join(_activity(one) for one in over),
        f"all ranks wait for each other; {_location(longest)}",
    )


def _was_made_before(one: _Waiting) -> bool:
    """Return whether such a call was made before, as the calls of every step are."""
    calls = () if one.evidence.answer is None else one.evidence.answer.calls
    return any(
        call.group == one.call.group and call.number < one.call.number and _form(call) == _form(one.call)
        for call in calls
    )


def _extra_call(one: _Waiting, all_waiting: Sequence[_Waiting]) -> HangVerdict:
    """Judge a rank that waits in a call new to the run while the others wait in a call of every step."""
    rank = one.evidence.rank
    other = next(each for each in all_waiting if _was_made_before(each))
    return HangVerdict(
        rank,
        rank,
        f"rank {rank} has waited for {one.call.seconds:.0f} s in {one.call} of {one.group}, a call that was not made "
        f"before and that the others do not make; rank {other.evidence.rank} has waited for {other.call.seconds:.0f} s "
        f"in {other.call} of {other.group}; {_activity(one.evidence)}",
        f"alone in {one.call.name}; {_location(one.evidence)}",
    )


def _skipped_call(one: _Waiting, culprit: Evidence) -> HangVerdict:
    """Judge a rank that has ended, or continued, without a call that another one waits in."""
    if not culprit.progress.running:
        return HangVerdict(
            culprit.rank,
            one.evidence.rank,
            f"rank {culprit.rank} has ended its run without joining {_waited(one)}",
            f"rank {culprit.rank} has ended its run, which others wait for in {one.call.name}",
        )
    return HangVerdict(
        culprit.rank,
        culprit.rank,
        f"rank {culprit.rank} left out {_waited(one)}; {_other_wait(culprit)}",
        f"left out {one.call.name}; {_location(culprit)}",
    )


def _waited(one: _Waiting) -> str:
    return f"{one.call} of {one.group}, in which rank {one.evidence.rank} has waited for {one.call.seconds:.0f} s"


def _other_wait(one: Evidence) -> str:
    call = next(iter(one.pending), None)
    groups = {} if one.answer is None else one.answer.groups
    if call is None or call.group not in groups:
        return _activity(one)
    return f"{_activity(one)}, in {call} of {groups[call.group]}"


def _listed(ranks: Sequence[int], verb: str = "") -> str:
    """Return ``rank 0 has called`` or ``ranks 0, 2 have called``."""
    several = len(ranks) > 1
    text = f"rank{'s' if several else ''} {', '.join(map(str, ranks))} {'have' if several else 'has'}"
    return f"{text} {verb}".rstrip()
