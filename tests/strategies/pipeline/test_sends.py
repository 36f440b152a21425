"""Sends that are known to be received."""

from trainwright.strategies.pipeline.stage import releasable_sends

# Two ranks, two stages, two micro-batches, one forward ahead of one backward.
ORDERS = {
    0: [
        *[("F", 0, 0), ("SEND_F", 0, 0), ("F", 0, 1), ("SEND_F", 0, 1)],
        *[("RECV_B", 0, 0), ("B", 0, 0), ("RECV_B", 0, 1), ("B", 0, 1)],
    ],
    1: [
        *[("RECV_F", 1, 0), ("F", 1, 0), ("B", 1, 0), ("SEND_B", 1, 0)],
        *[("RECV_F", 1, 1), ("F", 1, 1), ("B", 1, 1), ("SEND_B", 1, 1)],
    ],
}


def test_releasable_sends() -> None:
    # A returned gradient releases its activation.
    assert releasable_sends(ORDERS, 0) == {("B", 0, 0): [("SEND_F", 0, 0)], ("B", 0, 1): [("SEND_F", 0, 1)]}
    # The first rank sends its last activation before it receives any gradient.
    assert releasable_sends(ORDERS, 1) == {}
    # A later activation releases a gradient.
    first = ORDERS[0]
    orders = {**ORDERS, 0: [*first[:2], *first[4:6], *first[2:4], *first[6:]]}
    assert releasable_sends(orders, 1) == {("F", 1, 1): [("SEND_B", 1, 0)]}
