"""Data parallelism by torch's ``DistributedDataParallel``."""

# No postponed annotations: torch inspects that of a hook's bucket.

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainwright.core.lightning_internals import _register_ddp_comm_hook
from trainwright.strategies.averaging.compression.buckets import ReplicaPart
from trainwright.strategies.averaging.means import OverlappedMean
from trainwright.strategies.averaging.replica_averaging import ReplicaAveraging
from trainwright.strategies.base.measures import Measures
from trainwright.strategies.base.parameter_memory import own_elements
from trainwright.strategies.base.strategy import LayoutStrategy
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.communication.advice import best_piece_bytes
from trainwright.strategies.contract.same_model import differ_between_ranks
from trainwright.strategies.contract.waits.waiting import ReducerWaits, Waits
from trainwright.strategies.data.batch_norm import adapt_layer_sync
from trainwright.strategies.data.options import DDPOptions

# Bytes; smaller buckets cost more in calls than the link model accounts for.
_LEAST_BUCKET = 2**18


class DDPStrategy(LayoutStrategy, LightningDDPStrategy):
    """Data parallelism: every rank holds the whole model and reads different samples.

    Gradients are averaged during backward, or after it with compression; 2 x parameters are sent per rank and step.

    Args:
        gradient_as_bucket_view: keep gradients in the communication buffers, so that they are held once.
        **kwargs: options, see ``DDPOptions``; others go to Lightning's ``DDPStrategy`` and torch's
            ``DistributedDataParallel``. ``communication="auto"`` chooses ``average_by`` and ``bucket_mib`` unless they
            are given, which changes only the order of sums; neither they nor ``compression`` can be combined with
            ``ddp_comm_hook``.

    Raises:
        ValueError: if the options contradict each other.
    """

    strategy_name = "ddp"
    saves_one_file = True
    options_class = DDPOptions
    passes_to = (DistributedDataParallel,)
    options: DDPOptions

    def __init__(self, *, gradient_as_bucket_view: bool = True, **kwargs: Any) -> None:
        super().__init__(gradient_as_bucket_view=gradient_as_bucket_view, **kwargs)
        self._ddp_kwargs["find_unused_parameters"] = self.options.find_unused_parameters
        bucket_mib = self.options.bucket_mib
        if bucket_mib is not None:
            if "bucket_cap_mb" in kwargs:
                raise ValueError(f"bucket_mib={bucket_mib} and bucket_cap_mb mean the same; leave out one of them")
            self._ddp_kwargs["bucket_cap_mb"] = bucket_mib
        self._given_bucket = "bucket_cap_mb" in self._ddp_kwargs
        self.averaging: ReplicaAveraging = ReplicaAveraging(self, self.options)
        self.measures = _ReducerMeasures(self)
        self._beside: OverlappedMean | None = None
        self._averaged: dict[str, nn.Parameter] | None = None  # until the first update
        self._has_run_backward = False
        if self.averaging.after_backward and self._ddp_comm_hook is not None:
            choice = self.averaging.compression
            given = f"average_by={self.averaging.asked}" if choice is None else f"compression={choice.name}"
            raise ValueError(f"{given} and a ddp_comm_hook both decide how gradients are sent; leave out one of them")

    def setup(self, trainer: Trainer) -> None:
        """Materialize the model, prepare its blocks, then set up as Lightning does."""
        own_elements(self.lightning_module)
        self._refuse_different_models()
        self._materialise()
        self._blocks.prepare(self.lightning_module, self._find_blocks())
        self._end_means()
        self._layer_sync = adapt_layer_sync(self._layer_sync, self.root_device)
        if trainer.state.fn == TrainerFn.FITTING:
            self.averaging.check_nodes()
            if self.averaging.communication == "auto" and self.world_size > 1:
                self._choose()
        super().setup(trainer)
        self.averaging.set_up(plain_after_backward=False)
        agree = self.world_size > 1 and self.averaging.compression is None and self._ddp_comm_hook is None
        self.traits = replace(self.traits, gradients_agree=agree)
        self.state.load_initial_weights()
        self._record_frozen()
        if not self.lightning_module.automatic_optimization:
            for optimizer in self.optimizers:
                optimizer.register_step_pre_hook(self._refuse_unused)

    def configure_ddp(self) -> None:
        """Wrap the module as Lightning does, remembering the parameters that torch's reducer averages."""
        self._averaged = {name: p for name, p in self.lightning_module.named_parameters() if p.requires_grad}
        self._has_run_backward = False
        used = self._used = set[str]()
        self._watches = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: used.add(name))
            for name, parameter in self._averaged.items()
        ]
        super().configure_ddp()

    def _include(self, unfrozen: Sequence[nn.Parameter]) -> None:
        """Wrap the module anew, since torch's reducer knows only parameters that were trainable when it was created."""
        super()._include(unfrozen)
        if self.averaging.compression is not None or not isinstance(self.model, DistributedDataParallel):
            return  # averaged without the reducer
        self._end_means()
        self.model._remove_autograd_hooks()
        self.model = self.lightning_module
        # Keep each rank's running statistics.
        with with_attributes(self, _ddp_kwargs={**self._ddp_kwargs, "init_sync": False}):
            self.configure_ddp()

    def teardown(self) -> None:
        """Stop averaging threads, then tear down as Lightning does."""
        self._end_means()
        super().teardown()

    def _end_means(self) -> None:
        if self._beside is not None:
            self._beside.close()
            self._beside = None

    def _choose(self) -> None:
        """Choose the averaging way and bucket size by measured links, unless they are given. A collective."""
        averaging = self.averaging
        if averaging.compression is not None or self._ddp_comm_hook is not None:
            reason = "compression decides" if averaging.compression is not None else "a ddp_comm_hook decides"
            averaging.changed = f"communication=auto changed nothing: {reason} how gradients are sent."
            return
        size = 4 * sum(p.numel() for p in self.lightning_module.parameters() if p.requires_grad)
        if averaging.asked is None:
            averaging.choose_fastest(size)
        else:
            averaging.measure_ways([averaging.asked])
        self._choose_bucket(size)

    def _choose_bucket(self, size: int) -> None:
        """Choose the bucket size with the least predicted wait for ``size`` bytes of gradients."""
        averaging = self.averaging
        if self._given_bucket:
            averaging.changed = f"{averaging.changed} The bucket size stays: bucket_mib was given.".strip()
            return
        way = next(way for way in averaging.ways if way.name == averaging.average_by)
        bucket = max(best_piece_bytes(way.latency, size * way.per_byte, size), _LEAST_BUCKET) / 2**20
        self._ddp_kwargs["bucket_cap_mb"] = bucket
        chosen = f"communication=auto set buckets of {bucket:.3g} MiB (torch's default is 25 MiB)."
        rank_zero_info(chosen)
        averaging.changed = f"{averaging.changed} {chosen}".strip()

    def _replica_parts(self) -> Iterator[ReplicaPart]:
        for name, parameter in self.lightning_module.named_parameters():
            yield ReplicaPart(name, parameter)

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        if self.averaging.compression is not None and self.world_size > 1:
            # DDP rebuilds its buckets after the first backward; residuals need fixed ones.
            self.model.register_comm_hook(None, _leave_local)
            return
        self._beside = self.averaging.overlapped_mean()
        if self._beside is not None:
            self.model.register_comm_hook(self._beside, _average)
            return
        # Lightning registers hooks on CUDA only and silently drops them elsewhere.
        _register_ddp_comm_hook(
            model=self.model,
            ddp_comm_state=self._ddp_comm_state,
            ddp_comm_hook=self._ddp_comm_hook,
            ddp_comm_wrapper=self._ddp_comm_wrapper,
        )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip averaging inside: more micro-batches of the optimizer step follow."""
        with self.averaging.accumulating(), super().block_backward_sync():
            yield

    def post_backward(self, closure_loss: Tensor) -> None:
        """Check for unused parameters after the backward of a step."""
        super().post_backward(closure_loss)
        self._has_run_backward = True
        if self.lightning_module.automatic_optimization:
            self._refuse_unused()

    def _refuse_unused(self, *_: Any) -> None:
        """Raise before the first update if gradients are missing.

        Raises:
            RuntimeError: if a parameter was not used in the loss, which torch detects one step too late.
        """
        model = self.model
        if self._averaged is None or not isinstance(model, DistributedDataParallel):
            return
        if not model.require_backward_grad_sync:  # more micro-batches follow
            return
        if not self._has_run_backward:  # a closure may follow
            self._refuse_unequal({name: p.grad for name, p in self._averaged.items() if p.grad is not None})
            return
        averaged, self._averaged = self._averaged, None
        for watch in self._watches:
            watch.remove()
        if model.find_unused_parameters or model.static_graph:
            return
        missing = [name for name in averaged if name not in self._used]  # a hook may have dropped gradients
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise RuntimeError(f"Parameters were not used in the loss ({', '.join(missing[:3])}{more}), {_UNUSED}")

    def _refuse_unequal(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise if gradients that no backward has averaged differ between ranks.

        Raises:
            RuntimeError: naming one.
        """
        differing = differ_between_ranks(list(gradients.items()), self.root_device)
        if differing:
            raise RuntimeError(
                f"The first step of an optimizer uses gradients that were assigned ({differing[0]}, for example by "
                "torch.autograd.grad) and differ between ranks: only those of backward are averaged. Type "
                "self.manual_backward(loss), or average them: p.grad = self.all_gather(gradient).mean(0)."
            )

    def on_exception(self, exception: BaseException) -> None:
        """Explain torch's error for parameters unused in a later step."""
        if "Expected to have finished reduction in the prior iteration" in str(exception):
            exception.add_note(f"Some parameters were not used in the loss, {_UNUSED}")


class _ReducerMeasures(Measures):
    def measure_waits(self) -> Waits:
        """See the base class; torch's reducer waits in C++."""
        return ReducerWaits(self._strategy.root_device, self._strategy.lightning_module.parameters())


_UNUSED = (
    "so DDP still waits for their gradients. If that is intended, set strategy.find_unused_parameters=true (in Python "
    "DDPStrategy(find_unused_parameters=True)); otherwise use them in the loss or freeze them."
)


def _leave_local(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook that sends nothing."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _average(means: OverlappedMean, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook of averages other than one all-reduce."""
    return means.begin(bucket.buffer())
