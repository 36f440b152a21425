"""Which sends of a rank are known to have been taken, and when."""

from trainwright.strategies.pipeline.sends import known_to_be_taken

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


def test_a_gradient_that_comes_back_tells_that_the_activation_was_taken() -> None:
    assert known_to_be_taken(ORDERS, 0) == {("B", 0, 0): [("SEND_F", 0, 0)], ("B", 0, 1): [("SEND_F", 0, 1)]}


def test_what_was_sent_before_the_receiver_began_to_receive_tells_nothing() -> None:
    """The first rank has sent its last activation before it receives any gradient."""
    assert known_to_be_taken(ORDERS, 1) == {}


def test_an_activation_that_was_sent_later_tells_that_the_gradient_was_taken() -> None:
    first = ORDERS[0]
    orders = {**ORDERS, 0: [*first[:2], *first[4:6], *first[2:4], *first[6:]]}
    assert known_to_be_taken(orders, 1) == {("F", 1, 1): [("SEND_B", 1, 0)]}
