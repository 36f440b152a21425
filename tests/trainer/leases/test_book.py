import random
from collections import Counter

import pytest

from trainwright.trainer.data.partition import Read, remaining
from trainwright.trainer.leases.book import Guarantee, Lease, LeaseBook


def play(book: LeaseBook, workers: int, seed: int, deaths: int = 0) -> tuple[Counter[int], set[int]]:
    """Let workers of random speeds lease, train and report; some die in between.

    Returns:
        How often each position was trained on, and those of chunks that a dead worker had trained on and not reported.
    """
    rng = random.Random(seed)
    trained: Counter[int] = Counter()
    unreported: set[int] = set()
    held: dict[int, list[Lease]] = {worker: [] for worker in range(workers)}
    speeds = {worker: rng.random() + 0.05 for worker in held}
    while not book.is_settled:
        (worker,) = rng.choices(list(held), [speeds[worker] for worker in held])
        if deaths and len(held) > 1 and rng.random() < 0.1:
            deaths -= 1
            for lease in held.pop(worker):
                if rng.random() < 0.5:  # trained, but died before it reported
                    trained.update(range(lease.first, lease.last))
                    unreported.update(range(lease.first, lease.last))
            book.leave(worker, dead=True)
            continue
        mine = held[worker]
        if len(mine) < 3 and rng.random() < 0.6:
            lease = book.lease(worker)
            if lease is not None:
                mine.append(lease)
        elif mine:
            lease = mine.pop(0)
            trained.update(range(lease.first, lease.last))
            book.finish(worker, [lease.number])
    return trained, unreported


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize(("samples", "chunk"), [(0, 4), (1, 4), (63, 8), (64, 8)])
def test_each_sample_once(workers: int, samples: int, chunk: int) -> None:
    for seed in range(5):
        book = LeaseBook(samples, chunk)
        trained, _ = play(book, workers, seed)
        assert trained == Counter(range(samples))
        assert book.is_complete
        assert book.used() == ([(0, samples)] if samples else [])


@pytest.mark.parametrize("seed", range(20))
def test_deaths_at_least_once(seed: int) -> None:
    book = LeaseBook(101, 4, "at_least_once")
    trained, unreported = play(book, 4, seed, deaths=3)
    assert set(trained) == set(range(101))
    # Only unreported chunks of dead workers are repeated.
    assert {position for position, times in trained.items() if times > 1} <= unreported
    assert book.used() == [(0, 101)]


@pytest.mark.parametrize("seed", range(20))
def test_deaths_at_most_once(seed: int) -> None:
    book = LeaseBook(101, 4, "at_most_once")
    trained, _ = play(book, 4, seed, deaths=3)
    assert set(trained.values()) == {1}
    assert book.done_samples + book.lost_samples == 101
    assert book.is_complete


def test_late_finish_after_reassignment() -> None:
    book = LeaseBook(8, 4)
    first = book.lease(0)
    assert first is not None
    book.leave(0, dead=True)
    assert book.lease(1) == first
    book.finish(0, [first.number])
    assert book.done_samples == 0
    for _ in range(2):
        book.finish(1, [first.number])
        assert book.done_samples == 4


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_give_back(guarantee: Guarantee) -> None:
    book = LeaseBook(12, 4, guarantee)
    leases = [book.lease(0) for _ in range(3)]
    assert not book.has_more
    assert not book.is_settled
    book.give_back(0, [1])
    assert book.lease(1) == leases[1]
    book.leave(0, dead=False)
    assert [book.lease(1), book.lease(1)] == [leases[0], leases[2]]


def test_limit() -> None:
    book = LeaseBook(40, 4, limit=10)
    leases = [book.lease(0) for _ in range(4)]
    assert [lease is None for lease in leases] == [False, False, False, True]
    book.finish(0, [0, 1])
    assert book.lease(0) is None
    assert not book.is_settled
    book.leave(0, dead=True)  # none of its leases is done
    assert book.lease(1) == leases[2]
    book.finish(1, [2])
    assert book.is_settled
    assert not book.is_complete
    assert book.used() == [(0, 12)]


@pytest.mark.parametrize("seed", range(5))
def test_resume_with_other_workers_and_chunks(seed: int) -> None:
    order = list(range(100, 197))
    random.Random(seed).shuffle(order)
    read: Counter[int] = Counter()
    history: tuple[Read, ...] = ()
    for workers, chunk in ((3, 4), (1, 7), (4, 3), (2, 50)):
        left, start = remaining(order, history, lambda name: pytest.fail(name))
        left = left[start:]
        book = LeaseBook(len(left), chunk, limit=len(left) // 2 if chunk < 50 else None)
        trained, _ = play(book, workers, seed)
        read.update(left[position] for position in trained.elements())
        history = (*history, Read.of_ranges(book.used()))
        # As saved in a checkpoint.
        history = tuple(Read.from_json(entry.to_json()) for entry in history)
    assert read == Counter(order)
