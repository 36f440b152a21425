"""The batches of one worker where samples are leased: chunk by chunk of the epoch's order, as long as there are any.

A loader reads ahead, so a chunk that was drawn is not one that was trained on: a lease is done when the loop has made
the optimizer step of its last micro-batch. A chunk is what one worker trains on in one optimizer step.
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
from trainwright.trainer.data.partition import Read, add_read, what_is_left
from trainwright.trainer.leases.book import GUARANTEES, Lease
from trainwright.trainer.leases.service import Address, LeaseDesk, LeaseService, listening_host

if TYPE_CHECKING:
    from trainwright.trainer.contract import RunTrainer

# Where the first worker says how to reach its service.
_STORE_KEY = "trainwright/leases/{}"


# Services that ranks have met at through a store: each has a key of its own, the same on all ranks.
_met: weakref.WeakKeyDictionary[dist.Store, int] = weakref.WeakKeyDictionary()


def _meeting(of_fit: dist.Store | None) -> tuple[dist.Store, str]:
    if of_fit is not None:
        return of_fit, _STORE_KEY.format("fit")
    store = default_store()
    _met[store] = _met.get(store, 0) + 1
    return store, _STORE_KEY.format(_met[store])


class SampleLeases:
    """This rank's part in leasing the epochs of a run; the first worker runs the service.

    Args:
        trainer: the Trainer.

    Attributes:
        spent: whether the run has trained on as many samples as ``max_steps`` global batches have.
    """

    def __init__(self, trainer: RunTrainer) -> None:
        self._trainer = trainer
        self._service: LeaseService | None = None
        self._desk: LeaseDesk | None = None
        self._counted: int | None = None  # global batches of which schedulers know
        self.spent = False

    @property
    def most(self) -> int | None:
        """Samples that the whole run trains on; ``None``: no limit."""
        steps, batch = self._trainer.fit_loop.max_steps, self._trainer.global_batch
        return None if steps in (None, -1) or batch is None else int(steps) * batch.size

    @property
    def desk(self) -> LeaseDesk:
        """Where this rank asks for leases."""
        if self._desk is None:
            self._desk = self._connect()
        return self._desk

    def _connect(self) -> LeaseDesk:
        strategy: Any = self._trainer.strategy
        alone = strategy.ranks.num_data_ranks == 1
        store, key = (None, "") if alone else _meeting(peers_of(strategy).fit_store)
        if strategy.ranks.data_rank == 0:
            host = listening_host(os.environ)
            service = LeaseService(
                strategy.ranks.num_data_ranks, strategy.traits.leases_samples, self.most, host, run_token()
            )
            self._service, address = service, service.address
            if store is not None:
                # Whoever reaches the store can read it: the token is there only where ranks were given none.
                told = [address.host, address.port, "" if run_token() else address.token]
                store.set(key, seal(run_token(), told).decode())
        else:
            assert store is not None
            host, port, token = unseal(run_token(), store.get(key))
            address = Address(host, port, token or run_token())
        return LeaseDesk(address, strategy.ranks.data_rank)

    def open(self, epoch: int, samples: int, chunk: int, before: int) -> LeaseDesk:
        """Begin to lease an epoch, see :meth:`~trainwright.trainer.leases.service.LeaseDesk.open`."""
        self.desk.open(epoch, samples, chunk, before)
        if self._counted is None:  # others may have trained on more by now, which schedulers here do not know of
            batch = self._trainer.global_batch
            self._counted = 0 if batch is None else before // batch.size
        return self.desk

    @property
    def global_batches(self) -> int:
        """See :attr:`LeasedBatchSampler.global_batches`."""
        batch = self._trainer.global_batch
        return 0 if batch is None else self.desk.done_samples // batch.size

    def global_batches_passed(self) -> int:
        """See :meth:`LeasedBatchSampler.global_batches_passed`."""
        before, self._counted = self._counted or 0, self.global_batches
        return self._counted - before

    @property
    def counted(self) -> int:
        """Global batches of which this worker's schedulers know."""
        return self.global_batches if self._counted is None else self._counted

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be asked, before ``fit`` and after it."""
        return self._desk is None

    def close(self) -> None:
        """Say goodbye, and end the service if it is here."""
        if self._desk is not None:
            self._desk.close()
        if self._service is not None:
            self._service.stop()
        self._desk = self._service = self._counted = None
        self.spent = False


class _Tag(NamedTuple):
    """Of a micro-batch: samples of its own, and of the optimizer step."""

    own: int
    step: int


class LeasedBatchSampler(RankBatchSampler):
    """The micro-batches of the chunks that this worker gets; nobody knows beforehand how many.

    A chunk has ``micro_batch_size x accumulation`` samples and makes ``accumulation`` micro-batches; those of the last
    chunk of an epoch are smaller, and padding if there are fewer samples than micro-batches.

    Args:
        order: the order of samples.
        micro_batch_size: samples of a micro-batch.
        accumulation: micro-batches of an optimizer step.
        drop_last: leave out the last chunk if it is not full.
        leases: where to ask for them.
        most: samples of an epoch that are read at most; ``None``: all.
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
        # Samples that the run had trained on before it began to lease.
        self.trained_before: Callable[[], int] = lambda: 0
        # Whether training reads: loaders are begun earlier than that, and before a state is put back.
        self.is_open = False
        self._held: deque[tuple[Lease, int]] = deque()  # with the index after its last micro-batch
        self._held_epoch = -1
        self._tags: dict[int, _Tag] = {}
        self._rest: tuple[Any, Sequence[int]] | None = None
        self._last_state: dict[str, Any] | None = None
        # Whether all workers have met within the epoch, since one was told to end.
        self.has_ended = False

    def __len__(self) -> int:
        raise TypeError("how many batches a worker leases is not known beforehand")

    # ---- reading --------------------------------------------------------------------------------------------------

    def resume(self, resumed: Resumed) -> None:
        """See :class:`~trainwright.trainer.data.data_order.DealingSampler`."""
        super().resume(resumed)
        self._rest = None

    def left(self) -> Sequence[int]:
        """Indices of the samples of the present epoch that were not read before it was resumed, in order."""
        resumed = self._of_this_epoch
        if self._rest is None or self._rest[0] != (self.current_epoch, resumed):
            self._rest = ((self.current_epoch, resumed), self._find_left(resumed))
        return self._rest[1]

    def _find_left(self, resumed: Resumed | None) -> Sequence[int]:
        indices, start, read = self.sampler.indices(), 0, 0
        if resumed is not None:
            read = resumed.samples
            history = resumed.history or (Read("interleave", read),)
            indices, start = what_is_left(indices, history, self.partition_named)
        left = indices[start:]
        if self.most is not None:
            left = left[: max(self.most - read, 0)]
        return left[: len(left) - len(left) % self.chunk] if self.drop_last else left

    @property
    def epoch_samples(self) -> int:
        """Samples of a whole epoch."""
        samples = len(self.sampler)
        samples = samples if self.most is None else min(samples, self.most)
        return samples - samples % self.chunk if self.drop_last else samples

    def __iter__(self) -> Iterator[list[int]]:
        if not self.is_open:
            return
        epoch, left = self.current_epoch, self.left()
        self._forget_read_ahead(epoch)
        desk = self.leases.open(epoch, len(left), self.chunk, self.trained_before())
        index = self.consumed()
        while (lease := desk.lease(epoch)) is not None:
            self._held.append((lease, index + self.group))
            for batch, own in self._cut(left[lease.first : lease.last]):
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

    def _forget_read_ahead(self, epoch: int) -> None:
        """What an earlier pass over the loader had drawn is drawn anew."""
        if self._held and self._held_epoch == epoch:
            self.leases.desk.give_back(epoch, [lease for lease, _ in self._held])
        self._held.clear()
        self._held_epoch = epoch

    # ---- told by the loop -----------------------------------------------------------------------------------------

    def trained(self, batches: int) -> None:
        """The optimizer steps of the first so many micro-batches of the epoch are made."""
        done = []
        while self._held and self._held[0][1] <= batches:
            done.append(self._held.popleft()[0])
        if done:
            self.leases.desk.finish(self._held_epoch, done)
        for index in [index for index in self._tags if index < batches]:
            del self._tags[index]

    def wait_for_more(self) -> bool:
        """Whether there is something to read again; else all workers have come to the end of the epoch, or to where
        they end within it (:attr:`has_ended`).

        To be called once the loader has run out and all that it gave has been trained on, or where the run is to end.
        """
        self._forget_read_ahead(self.current_epoch)
        answer = self.leases.desk.wait_for_more(self.current_epoch)
        self.leases.spent, self.has_ended = answer["spent"], answer.get("ended", False)
        return bool(answer["more"])

    @property
    def heard_of_end(self) -> ReceivedNotice | None:
        """A notice that some worker was given: nothing is leased any more. No step is left once all have met."""
        heard = None if self.leases.is_closed else self.leases.desk.heard
        return None if heard is None else ReceivedNotice(*heard, steps_left=0 if self.has_ended else 1)

    def tell_of_end(self, number: int, age: float) -> None:
        """Let all workers hear that this one was told to end."""
        if not self.leases.is_closed:
            self.leases.desk.tell_end(number, age)

    @property
    def global_batches(self) -> int:
        """Global batches' worth of samples on which the run has trained; at the end of an epoch the same on all."""
        return self.leases.global_batches

    def global_batches_passed(self) -> int:
        """Global batches' worth of samples on which all workers have trained since this was asked last, or since the
        run was begun or resumed; as far as this worker knows."""
        return self.leases.global_batches_passed()

    # ---- the cursor -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Where the epoch stands, the same on all workers; each has to ask. After the end of ``fit``: where it ended.

        Returns:
            ``samples`` of the epoch that were read, ``history`` how, ``complete`` whether that is all of it, and
            ``trained``, on how many samples the run has trained.
        """
        if self.leases.is_closed and self._last_state is not None:
            return dict(self._last_state)
        answer = self.leases.desk.state(self.current_epoch)
        read = Read.of_ranges([(first, last) for first, last in answer["used"]])
        self._last_state = {**self._state_with(read), "complete": answer["complete"], "trained": answer["done"]}
        return dict(self._last_state)

    def state_to_join(self, batch: int) -> dict[str, Any]:
        """For a worker that begins to lease what the others lease already; as :meth:`state`, but asks nobody.

        Args:
            batch: samples of a global batch.
        """
        nothing = Read.of_ranges([])
        return {**self._state_with(nothing), "complete": False, "trained": self.leases.counted * batch}

    def _state_with(self, read: Read) -> dict[str, Any]:
        """``samples`` and ``history`` of the epoch, with what was leased and is used."""
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
        """See :class:`~trainwright.trainer.data.data_order.DealingSampler`; empty, since the fit loop keeps it."""
        return {}

    # ---- weights of losses ----------------------------------------------------------------------------------------

    regular_waves = 0  # none is known beforehand
    whole_step = True  # a chunk is a whole optimizer step

    def is_padding(self, batch_idx: int) -> bool:
        """See :class:`~trainwright.trainer.data.data_order.RankBatchSampler`."""
        return self._tags[batch_idx].own == 0

    def loss_divisor(self, batch_idx: int, accumulation: int, whole_step: bool) -> float:
        """What to divide a micro-batch's mean loss by, so that the sum over a step is the mean over its samples."""
        own, step = self._tags[batch_idx]
        return step / own if own else float("inf")


def why_not_leased(trainer: RunTrainer, ranks: int) -> str | None:
    """Why the samples of a run cannot be leased as its Trainer is set; ``None``: they can.

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
        return f"data_partition={trainer.data_partition!r} says whose samples are whose; leave it out"
    if getattr(trainer, "balance", None) is not None:
        return "balance moves samples between ranks in step; leases do that for those that are not: leave it out"
    if trainer.uneven_steps:
        return f"uneven_steps=True: give a global_batch_size that is a multiple of the micro-batch times {ranks}"
    if isinstance(limit, float) and limit not in (0.0, 1.0):
        return f"limit_train_batches={limit}: give a whole number, micro-batches of each worker on average"
    if validates and not (isinstance(interval, float) and interval == 1.0):
        return f"val_check_interval={interval}: workers meet at the end of an epoch only; leave it at 1.0"
    return None
