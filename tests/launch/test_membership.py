"""Members, ranks and replicas of elastic runs."""

import pytest

from trainwright.core.layout import Layout
from trainwright.launch.members.generations import EndedGeneration, Membership
from trainwright.launch.members.mailbox import LeaveReport


def test_ddp_replica_has_one_rank():
    first = Membership(0, Layout(replicate=3), (0, 1, 2))
    second = first.next({1})
    assert second == Membership(1, Layout(replicate=2), (0, 2))
    assert second.rank_of(2) == 1
    assert second.rank_of(1) is None
    third = second.next((), (3,))
    assert third == Membership(2, Layout(replicate=3), (0, 2, 3))
    assert third.sources(second) == {3: 0}


def test_broken_replica_is_dropped():
    layout = Layout(pipeline=2, replicate=2, shard=2)
    first = Membership(0, layout, tuple(range(10, 18)))
    # Ranks are counted along the last axis first: stage 0 has ranks 0 to 3, of which 0 and 1 are the first replica.
    assert first.replicas == [(10, 11, 14, 15), (12, 13, 16, 17)]
    second = first.next({15})
    assert second.layout == Layout(pipeline=2, replicate=1, shard=2)
    assert second.members == (12, 13, 16, 17)


def test_new_replicas_get_state_from_the_same_place():
    layout = Layout(pipeline=2, replicate=2)
    before = Membership(4, layout, (1, 2, 3, 4))
    after = before.next({2}, (7, 8, 9))
    # Member 9 alone is no replica.
    assert after == Membership(5, layout, (1, 7, 3, 8))
    assert after.sources(before) == {7: 1, 8: 3}


def test_state_is_lost_without_a_whole_replica():
    assert Membership(0, Layout(replicate=2), (0, 1)).next({0, 1}, (2, 3)) is None
    assert Membership(0, Layout(replicate=2, shard=2), (0, 1, 2, 3)).next({0, 3}, (4, 5, 6, 7)) is None


def test_members_must_match_the_layout():
    with pytest.raises(ValueError, match="has 3 ranks, but the members are"):
        Membership(0, Layout(replicate=3), (0, 1))


def test_newest_common_snapshot():
    before = Membership(3, Layout(replicate=3), (4, 5, 6))
    parted = EndedGeneration(before, frozenset({5}), (LeaveReport(4, (30, 20), None), LeaveReport(6, (20, 10), "gone")))
    assert parted.common_step == 20
    other = EndedGeneration(before, frozenset({5}), (LeaveReport(4, (30, 20), None), LeaveReport(6, (), None)))
    assert other.common_step is None
    assert other.reason == (
        "without rank(s) 1 there is no step of which all others have an in-memory snapshot "
        "(rank 0: [30, 20]; rank 2: [])"
    )


def test_reason_without_a_whole_replica():
    parted = EndedGeneration(Membership(0, Layout(replicate=2), (0, 1)), frozenset({0, 1}), ())
    assert parted.common_step is None
    assert parted.reason == "no replica is whole without rank(s) 0, 1"
