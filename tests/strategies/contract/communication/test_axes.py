import pytest

from trainwright.core.layout import Layout
from trainwright.strategies.contract.communication.costs import KINDS, children, least_bytes, sent_bytes
from trainwright.strategies.contract.communication.meter import name_of

CASES = [
    (Layout(replicate=2), [0, 1], "all_reduce", "replicate"),
    (Layout(replicate=2, shard=2), [0, 1], "all_gather", "shard"),
    (Layout(replicate=2, shard=2), [0, 2], "all_reduce", "replicate"),
    (Layout(replicate=2, shard=2), [0, 1, 2, 3], "all_reduce", "world"),
    (Layout(replicate=2, shard=2), [0, 3], "all_reduce", "other"),
    (Layout(replicate=2, shard=2), [0], "all_reduce", "other"),
    (Layout(shard=2, context=2), [0, 1, 2, 3], "reduce_scatter", "shard-context"),
    (Layout(pipeline=2, shard=2, tensor=2), [2, 6], "send", "pipeline"),
    (Layout(pipeline=2, shard=2, tensor=2), [4, 5, 6, 7], "all_reduce", "shard-tensor"),
    (Layout(shard=2, expert=2), [0, 1], "all_gather", "shard"),
    (Layout(shard=2, expert=2), [0, 1], "all_to_all", "expert"),
    (Layout(shard=4, expert=2), [0, 1], "all_gather", "expert"),
    (Layout(shard=4, expert=2), [0, 2], "reduce_scatter", "expert_shard"),
    (Layout(context=2, expert=2), [0, 1], "all_to_all", "context-expert"),
    (Layout(context=2, expert=2), [0, 1], "send", "context"),
    (Layout(shard=2, context=2, expert=2), [0, 2], "all_gather", "shard"),
]


@pytest.mark.parametrize(("layout", "group", "kind", "name"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_names_of_groups(layout, group, kind, name):
    assert name_of(group, kind, layout) == name
    assert name_of(group[::-1], kind, layout) == name


@pytest.mark.parametrize("ranks", range(1, 10))
def test_a_broadcast_reaches_every_rank_once(ranks):
    reached = [children(place, ranks) for place in range(ranks)]
    assert sum(reached) == ranks - 1
    assert reached[0] == (ranks - 1).bit_length()


@pytest.mark.parametrize("kind", KINDS)
def test_sent_bytes_are_at_least_the_minimum(kind):
    assert least_bytes(kind, 100, 1) == sent_bytes(kind, 100, 1) == 0
    for ranks in (2, 3, 4, 7):
        sent, least = (
            sum(function(kind, 100, ranks, place) for place in range(ranks)) for function in (sent_bytes, least_bytes)
        )
        assert sent >= least - 1e-9
        assert sum(sent_bytes(kind, 100, ranks, place, "nccl") for place in range(ranks)) == pytest.approx(least)
