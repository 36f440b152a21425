"""Batches of one worker with leased samples: chunks of the epoch's order, as long as there are any.

A loader prefetches, so a chunk that was drawn has not been trained on: a lease is finished with the optimizer step of
its last micro-batch. A chunk is what one worker trains on in one optimizer step.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from trainwright.checkpoint.exchange.groups import default_store
from trainwright.core.run.peers import ReceivedNotice, peers_of
from trainwright.core.text.messages import run_token, seal, unseal
from trainwright.trainer.data.data_order import Drawn, RankBatchSampler, Resumed
from trainwright.trainer.data.epoch_order import EpochOrder
from trainwright.trainer.data.partition import Read, add_read, remaining
from trainwright.trainer.leases.book import GUARANTEES, Lease
from trainwright.trainer.leases.service import Address, LeaseDesk, LeaseService, listening_host

if TYPE_CHECKING:
    from trainwright.trainer.contract import RunTrainer

# Key of the service's address, written by the first worker.
_STORE_KEY = "trainwright/leases/{}"

# Services per store so far: each has its own key, equal on all ranks.
_services: weakref.WeakKeyDictionary[dist.Store, int] = weakref.WeakKeyDictionary()


def _store_and_key(of_fit: dist.Store | None) -> tuple[dist.Store, str]:
    if of_fit is not None:
        return of_fit, _STORE_KEY.format("fit")
    store = default_store()
    _services[store] = _services.get(store, 0) + 1
    return store, _STORE_KEY.format(_services[store])


class SampleLeases:
    """This rank's access to leases of a run's epochs; the first worker runs the service.

    Args:
        trainer: the Trainer.

    Attributes:
        spent: whether the run has trained on the samples of ``max_steps`` global batches.
    """

    def __init__(self, trainer: RunTrainer) -> None:
        self._trainer = trainer
        self._service: LeaseService | None = None
        self._desk: LeaseDesk | None = None
        self._counted: int | None = None  # global batches that schedulers know of
        self.spent = False

    @property
    def most(self) -> int | None:
        """Maximum samples of the whole run; ``None``: no limit."""
        steps, batch = self._trainer.fit_loop.max_steps, self._trainer.global_batch
        return None if steps in (None, -1) or batch is None else int(steps) * batch.size

    @property
    def desk(self) -> LeaseDesk:
        """The client of the service."""
        if self._desk is None:
            self._desk = self._connect()
        return self._desk

    def _connect(self) -> LeaseDesk:
        strategy: Any = self._trainer.strategy
        is_single = strategy.ranks.num_data_ranks == 1
        store, key = (None, "") if is_single else _store_and_key(peers_of(strategy).fit_store)
        if strategy.ranks.data_rank == 0:
            host = listening_host(os.environ)
            service = LeaseService(
                strategy.ranks.num_data_ranks, strategy.traits.leases_samples, self.most, host, run_token()
            )
            self._service, address = service, service.address
            if store is not None:
                # The store is public, so the token is in it only if ranks were given none.
                content = [address.host, address.port, "" if run_token() else address.token]
                store.set(key, seal(run_token(), content).decode())
        else:
            assert store is not None
            host, port, token = unseal(run_token(), store.get(key))
            address = Address(host, port, token or run_token())
        return LeaseDesk(address, strategy.ranks.data_rank)

    def open(self, epoch: int, samples: int, chunk: int, before: int) -> LeaseDesk:
        """Start to lease an epoch, see :meth:`~trainwright.trainer.leases.service.LeaseDesk.open`."""
        self.desk.open(epoch, samples, chunk, before)
        if self._counted is None:  # other workers may be ahead by now, which this one's schedulers do not know
            batch = self._trainer.global_batch
            self._counted = 0 if batch is None else before // batch.size
        return self.desk

    @property
    def global_batches(self) -> int:
        """Global batches of samples that the run has trained on; at the end of an epoch equal on all workers."""
        batch = self._trainer.global_batch
        return 0 if batch is None else self.desk.done_samples // batch.size

    def global_batches_passed(self) -> int:
        """Return the global batches of samples that all workers have trained on since the last call, or since the run
        started or resumed, as far as this worker knows."""
        before, self._counted = self._counted or 0, self.global_batches
        return self._counted - before

    @property
    def counted(self) -> int:
        """Global batches that this worker's schedulers know of."""
        return self.global_batches if self._counted is None else self._counted

    @property
    def is_closed(self) -> bool:
        """True if there is no connection, before and after ``fit``."""
        return self._desk is None

    def close(self) -> None:
        """Disconnect, and end the service if it runs here."""
        if self._desk is not None:
            self._desk.close()
        if self._service is not None:
            self._service.stop()
        self._desk = self._service = self._counted = None
        self.spent = False


class _Tag(NamedTuple):
    """Samples of a micro-batch, and of its optimizer step."""

    own: int
    step: int


class LeasedBatchSampler(RankBatchSampler):
    """The micro-batches of this worker's chunks, whose number is unknown in advance.

    A chunk has ``micro_batch_size x accumulation`` samples and makes ``accumulation`` micro-batches; those of the last
    chunk of an epoch are smaller, and padding if there are fewer samples than micro-batches.

    Args:
        order: the order of samples.
        micro_batch_size: samples per micro-batch.
        accumulation: micro-batches per optimizer step.
        drop_last: leave out an incomplete last chunk.
        leases: of the run.
        most: maximum samples of an epoch; ``None``: all.
    """

    def __init__(
        self,
        order: EpochOrder,
        micro_batch_size: int,
        accumulation: int,
        drop_last: bool,
        leases: SampleLeases,
        most: int | None = None,
    ) -> None:
        super().__init__(order, micro_batch_size, 0, 1, accumulation, drop_last)
        self.leases = leases
        self.chunk = micro_batch_size * accumulation
        self.most = most
        # Returns the samples that the run had trained on before it started to lease.
        self.trained_before: Callable[[], int] = lambda: 0
        # Whether training reads: loaders start earlier, and before a state is restored.
        self.is_open = False
        self._held: deque[tuple[Lease, int]] = deque()  # with the index after its last micro-batch
        self._held_epoch = -1
        self._tags: dict[int, _Tag] = {}
        self._rest: tuple[Any, Sequence[int]] | None = None
        self._last_state: dict[str, Any] | None = None
        # Whether all workers have synchronized within the epoch after a stop notice.
        self.has_ended = False

    def __len__(self) -> int:
        raise TypeError("the number of leased batches is unknown in advance")

    # ---- reading --------------------------------------------------------------------------------------------------

    def resume(self, resumed: Resumed) -> None:
        """See :class:`~trainwright.trainer.data.data_order.DealingSampler`."""
        super().resume(resumed)
        self._rest = None

    def rest(self) -> Sequence[int]:
        """Return the indices of the present epoch's samples that were not read before a resume, in order."""
        resumed = self._of_this_epoch
        if self._rest is None or self._rest[0] != (self.current_epoch, resumed):
            self._rest = ((self.current_epoch, resumed), self._find_rest(resumed))
        return self._rest[1]

    def _find_rest(self, resumed: Resumed | None) -> Sequence[int]:
        indices, start, read = self.sampler.indices(), 0, 0
        if resumed is not None:
            read = resumed.samples
            history = resumed.history or (Read("interleave", read),)
            indices, start = remaining(indices, history, self.partition_named)
        rest = indices[start:]
        if self.most is not None:
            rest = rest[: max(self.most - read, 0)]
        return rest[: len(rest) - len(rest) % self.chunk] if self.drop_last else rest

    @property
    def epoch_samples(self) -> int:
        """Samples of a whole epoch."""
        samples = len(self.sampler)
        samples = samples if self.most is None else min(samples, self.most)
        return samples - samples % self.chunk if self.drop_last else samples

    def __iter__(self) -> Iterator[list[int]]:
        if not self.is_open:
            return
        epoch, rest = self.current_epoch, self.rest()
        self._return_prefetched(epoch)
        desk = self.leases.open(epoch, len(rest), self.chunk, self.trained_before())
        index = self.consumed()
        while (lease := desk.lease(epoch)) is not None:
            self._held.append((lease, index + self.group))
            for batch, own in self._cut(rest[lease.first : lease.last]):
                self._tags[index] = _Tag(own, lease.samples)
                index += 1
                yield [Drawn(epoch, each) for each in batch] if self.with_epoch else batch  # type: ignore[misc]

    def _cut(self, samples: Sequence[int]) -> Iterator[tuple[list[int], int]]:
        each, more = divmod(len(samples), self.group)
        first = 0
        for place in range(self.group):
            last = first + each + (place < more)
            own = list(samples[first:last])
            yield own or list(samples[:1]), len(own)
            first = last

    def _return_prefetched(self, epoch: int) -> None:
        """Return chunks that an earlier pass over the loader has drawn, for a new draw."""
        if self._held and self._held_epoch == epoch:
            self.leases.desk.give_back(epoch, [lease for lease, _ in self._held])
        self._held.clear()
        self._held_epoch = epoch

    # ---- called by the loop ---------------------------------------------------------------------------------------

    def trained(self, batches: int) -> None:
        """Finish the leases of the first so many micro-batches of the epoch, whose optimizer steps are done."""
        done = []
        while self._held and self._held[0][1] <= batches:
            done.append(self._held.popleft()[0])
        if done:
            self.leases.desk.finish(self._held_epoch, done)
        for index in [index for index in self._tags if index < batches]:
            del self._tags[index]

    def wait_for_more(self) -> bool:
        """Wait, and return whether there is more to read; else all workers are at the end of the epoch, or of the run
        within it (:attr:`has_ended`).

        Call once the loader has run out and all of it has been trained on, or when the run is to end.
        """
        self._return_prefetched(self.current_epoch)
        answer = self.leases.desk.wait_for_more(self.current_epoch)
        self.leases.spent, self.has_ended = answer["spent"], answer.get("ended", False)
        return bool(answer["more"])

    @property
    def heard_of_end(self) -> ReceivedNotice | None:
        """A stop notice of any worker, after which nothing is leased; no step is left once all have synchronized."""
        heard = None if self.leases.is_closed else self.leases.desk.heard
        return None if heard is None else ReceivedNotice(*heard, steps_left=0 if self.has_ended else 1)

    def send_end_notice(self, number: int, age: float) -> None:
        """Send this worker's stop notice to all."""
        if not self.leases.is_closed:
            self.leases.desk.send_end_notice(number, age)

    # ---- the cursor -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the position in the epoch, equal on all workers, each of which must ask; after ``fit``, the last one.

        Returns:
            ``samples`` read of the epoch, ``history`` (how), ``complete`` (whether that is all), and ``trained``, the
            samples that the run has trained on.
        """
        if self.leases.is_closed and self._last_state is not None:
            return dict(self._last_state)
        answer = self.leases.desk.state(self.current_epoch)
        read = Read.of_ranges([(first, last) for first, last in answer["used"]])
        self._last_state = {**self._state_with(read), "complete": answer["complete"], "trained": answer["done"]}
        return dict(self._last_state)

    def state_to_join(self, batch: int) -> dict[str, Any]:
        """Return a :meth:`state` for a worker that joins others in an epoch, without asking them.

        Args:
            batch: samples per global batch.
        """
        nothing = Read.of_ranges([])
        return {**self._state_with(nothing), "complete": False, "trained": self.leases.counted * batch}

    def _state_with(self, read: Read) -> dict[str, Any]:
        """Return ``samples`` and ``history`` of the epoch, including what was leased and used."""
        resumed = self._of_this_epoch
        before: tuple[Read, ...] = ()
        if resumed is not None:
            before = resumed.history or add_read((), Read("interleave", resumed.samples))
        history = add_read(before, read) if read.samples else before
        plain = all(entry.partition == "interleave" for entry in history)
        return {
            "samples": read.samples + (0 if resumed is None else resumed.samples),
            "history": [] if plain else [entry.to_json() for entry in history],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, since the fit loop saves the state."""
        return {}

    # ---- weights of losses ----------------------------------------------------------------------------------------

    regular_waves = 0  # unknown in advance
    whole_step = True  # a chunk is a whole optimizer step

    def is_padding(self, batch_idx: int) -> bool:
        """See :class:`~trainwright.trainer.data.data_order.RankBatchSampler`."""
        return self._tags[batch_idx].own == 0

    def loss_divisor(self, batch_idx: int, accumulation: int, whole_step: bool) -> float:
        """Return the divisor of a micro-batch's mean loss that makes the sum over a step the mean over its samples."""
        own, step = self._tags[batch_idx]
        return step / own if own else float("inf")


def lease_problem(trainer: RunTrainer, ranks: int) -> str | None:
    """Return why the samples of a run cannot be leased; ``None`` if they can.

    Args:
        trainer: the Trainer.
        ranks: number of workers.
    """
    strategy: Any = trainer.strategy
    if strategy.traits.leases_samples not in GUARANTEES:
        return f"leases={strategy.traits.leases_samples!r} (allowed: {', '.join(map(repr, GUARANTEES))})"
    limit, interval = trainer.limit_train_batches, trainer.val_check_interval
    validates = trainer.fit_loop.epoch_loop._should_check_val_epoch() or trainer.enable_validation
    if trainer.data_partition != "interleave":
        return f"data_partition={trainer.data_partition!r} fixes the rank of each sample; remove it"
    if getattr(trainer, "balance", None) is not None:
        return "balance moves samples between synchronous ranks, leases do so between asynchronous ones: remove it"
    if trainer.uneven_steps:
        return f"uneven_steps=True: set a global_batch_size that is a multiple of the micro-batch times {ranks}"
    if isinstance(limit, float) and limit not in (0.0, 1.0):
        return f"limit_train_batches={limit}: set a whole number, micro-batches of each worker on average"
    if validates and not (isinstance(interval, float) and interval == 1.0):
        return f"val_check_interval={interval}: workers synchronize only at the end of an epoch; leave it at 1.0"
    return None
