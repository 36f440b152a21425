"""Which server holds what."""

import math

import pytest

from trainwright.strategies.parameter_server.server.sharder import share_out

SHAPES = [(1000, 8), (30, 10), (10,), (), (200, 3), (7, 0)]


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_every_row_has_one_server(servers, whole):
    held = share_out(SHAPES, servers, whole=whole)
    for index, shape in enumerate(SHAPES):
        pieces = sorted((p.start, p.stop) for slices in held for p in slices if p.parameter == index)
        assert [a for a, _ in pieces[1:]] == [b for _, b in pieces[:-1]]
        assert (pieces[0][0], pieces[-1][1]) == (0, shape[0] if shape else 1)
        assert len(pieces) == 1 or not whole


def test_servers_hold_about_as_much():
    sizes = [sum(piece.numel for piece in slices) for slices in share_out(SHAPES, 3)]
    share = sum(map(math.prod, SHAPES)) / 3
    assert max(sizes) <= 1.25 * share


def test_a_server_without_anything_is_refused():
    with pytest.raises(ValueError, match="at most servers=1"):
        share_out([(1, 5)], 2)
