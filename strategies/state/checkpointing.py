"""Checkpoints of every strategy: saving and loading run states, and loading initial weights."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.core.hooks import CheckpointHooks
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from trainwright.checkpoint.exchange.distinct import all_gather_values, any_of_ranks, problems_of_ranks
from trainwright.checkpoint.exchange.groups import WorldGroup
from trainwright.checkpoint.foreign.hugging_face import (
    adapter_tensors,
    hugging_face_facts,
    peft_facts,
    refuse_weights_under_adapters,
)
from trainwright.checkpoint.foreign.safetensors_folder import SafetensorsFolder
from trainwright.checkpoint.foreign.state_file import with_objects, write_file
from trainwright.checkpoint.format.manifest import read_manifest, verify
from trainwright.checkpoint.format.names import match_names, tied_names
from trainwright.checkpoint.format.source import TensorSource
from trainwright.checkpoint.memory.snapshots import Snapshot, SnapshotReader
from trainwright.checkpoint.read.run_state import RunState, SavedWeights, StoredTensor, holds_run_state, materialised
from trainwright.checkpoint.store.paths import normal_path
from trainwright.checkpoint.write.objects import HYPER_PARAMETERS, refuse_objects
from trainwright.checkpoint.write.save import Content, write
from trainwright.core.errors import CheckpointError, DamagedCheckpoint
from trainwright.strategies.contract.collectives.ranks import Ranks
from trainwright.strategies.contract.options import StrategyOptions
from trainwright.strategies.contract.part import Host
from trainwright.strategies.contract.randomness.state import random_state, set_random_state
from trainwright.strategies.state import rank_state, run_state
from trainwright.strategies.state.assemble import StateOwners
from trainwright.strategies.state.collector import OF_CALLBACKS, Collector
from trainwright.strategies.state.placement import Placement
from trainwright.strategies.state.rank_state import BUFFERS, COMPRESSION, KeptBack
from trainwright.strategies.state.run_state import OPTIMIZERS, WEIGHTS

# Key of this project's additions to Lightning's checkpoint dict.
OF_RUN = "trainwright"
# Bytes of a sharded state up to which `.ckpt` paths become one file by default: a second of the first rank's time.
_LARGEST_FILE = 256 * 2**20
# Cached, since reading package metadata takes milliseconds, in which training would stall at each save.
_version = cache(version)


class _Averaging(Protocol):
    """Gradient averaging that may keep compression residuals, see :class:`KeptBack`."""

    def kept_back(self, complete: bool) -> KeptBack: ...

    def keep_back(self, state: RunState | SnapshotReader, of_run: Mapping[str, Any]) -> None: ...


class _Certificate(Protocol):
    """A certificate; its key identifies layout and code, and is empty without one."""

    key: str
    spots: Any


class CheckpointedStrategy(Host, Protocol):
    """A strategy as seen by :class:`RunStates`."""

    strategy_name: str
    saves_one_file: bool
    options: StrategyOptions

    @property
    def averaging(self) -> _Averaging: ...

    ranks: Ranks

    @property
    def certificate(self) -> _Certificate: ...

    @property
    def placement(self) -> Placement: ...

    @property
    def _rank(self) -> int: ...

    @property
    def _state_owners(self) -> StateOwners | None: ...

    def _name_of(self) -> Callable[[Tensor], str]: ...

    def _whole_keys(self) -> list[str]: ...

    def _load_plain_optimizers(self, checkpoint: Mapping[str, Any]) -> None: ...

    def _knows_left_behind(self, of: str) -> bool: ...

    def _weights_changed(self) -> None: ...


class RunStates:
    """Checkpoints of a strategy, independent of layout: any layout can load those of any other.

    A checkpoint is a folder, see :mod:`trainwright.checkpoint`, or one file (option ``one_file``).

    Args:
        strategy: to save and load.
        init_from: initial weights if no checkpoint is given: a safetensors file, a folder of them (as written by
        Hugging
            Face) or a run state; each rank reads its shards. ``None``: off.
    """

    def __init__(self, strategy: CheckpointedStrategy, init_from: str | Path | None = None) -> None:
        self._strategy = strategy
        self.init_from = None if init_from is None else str(init_from)
        # The module whose initial weights were loaded; they are not loaded again.
        self._initialized: nn.Module | None = None
        self._checkpoint_group = WorldGroup()
        # Rank state to restore when training starts.
        self.pending: dict[str, Tensor] | None = None
        self._previously_trained: set[str] = set()
        # Key of the resumed run's certificate, and facts about the batches compared.
        self.resumed_certificate: tuple[str, Iterable[str]] = "", ()
        self._pending_kept_back: tuple[RunState | SnapshotReader, Mapping[str, Any]] | None = None

    def group(self) -> dist.ProcessGroup | None:
        """Return a gloo group of all ranks for checkpointing; ``None`` for one rank. The first call is a collective.

        Background saving on a group used by training would interleave messages, on which gloo aborts.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return self._checkpoint_group.get()

    def forget(self) -> None:
        """Drop the group and pending state, for the next run."""
        self._checkpoint_group.forget()
        self.pending = self._pending_kept_back = None

    # ---- saving -----------------------------------------------------------------------------------------------------

    def content(self, checkpoint: Mapping[str, Any], *, complete: bool = False) -> Content:
        """Return this rank's contribution to a checkpoint: views of its tensors, no copies. A collective.

        Args:
            checkpoint: Lightning's checkpoint dict, from ``dump_checkpoint`` of its connector.
            complete: include this rank's copies of what another rank would write for all (buffers, tensors in callback
                states), so that it can resume from its own part alone: for
                :class:`~trainwright.checkpoint.memory.snapshots.Snapshot`, not for files.
        """
        own = self._strategy
        collector = Collector(own.lightning_module, own.placement, own._name_of(), own._state_owners, complete)
        tree = collector.collect(checkpoint, self._strategy.optimizers)
        if OPTIMIZERS in checkpoint:
            kept = self._strategy.averaging.kept_back(complete)
            collector.add_of_rank(self._strategy._rank, {**random_state(self._strategy.root_device), **kept.of_rank})
            tree[OF_RUN] = {"layout": asdict(self._strategy.layout), "trained": sorted(self._trained())}
            if self._strategy.certificate.key:
                tree[OF_RUN]["certificate"] = self._strategy.certificate.key
                tree[OF_RUN]["compared"] = sorted(getattr(self._strategy.certificate.spots, "known", ()))
            if kept.about:
                collector.tensors.update(kept.tensors)
                tree[OF_RUN][COMPRESSION] = dict(kept.about)
        if complete:
            refuse_objects({key: value for key, value in collector.objects.items() if key not in HYPER_PARAMETERS})
        return Content(tree, collector.tensors, self._about(checkpoint), objects=collector.objects)

    def _about(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        module = self._strategy.lightning_module
        trainer: Any = module.trainer
        batch = getattr(trainer, "global_batch", None)
        return {
            "kind": "run state" if OPTIMIZERS in checkpoint else "weights",
            "step": int(checkpoint.get("global_step", 0)),
            "epoch": int(checkpoint.get("epoch", 0)),
            "strategy": self._strategy.strategy_name,
            "layout": asdict(self._strategy.layout),
            "world_size": int(getattr(self._strategy, "world_size", 1)),
            "data_ranks": self._strategy.ranks.num_data_ranks,
            "global_batch_size": None if batch is None else batch.size,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1},
            "module": f"{type(module).__module__}.{type(module).__qualname__}",
            "hugging_face": hugging_face_facts(module),
            "peft": peft_facts(module),
            "init_from": None if self.init_from is None else normal_path(self.init_from),
            "versions": {
                **{name: _version(name) for name in ("trainwright", "torch", "lightning")},
                "python": platform.python_version(),
            },
        }

    def save(self, content: Content, filepath: Any, storage_options: Any) -> None:
        """Write a run state to ``filepath``, a folder or a file. A collective.

        Raises:
            CheckpointError: on every rank, if one failed; an existing checkpoint stays intact.
        """
        if storage_options is not None:
            raise TypeError(
                "storage_options are for a custom CheckpointIO plugin; a run state takes none. Leave them out, or pass "
                "the plugin that supports them as Trainer(plugins=[...])."
            )
        path = str(filepath)
        most = self._largest_file(path)
        if most == 0:
            write(content, path, self.group())
        else:
            write_file(content, path, self.group(), most)

    def _largest_file(self, path: str) -> float:
        """Return the most bytes of a state that is written to ``path`` as a file; 0: always a folder."""
        choice = self._strategy.options.one_file
        if self._strategy.saves_one_file if choice is None else choice:
            return math.inf
        return _LARGEST_FILE if choice is None and path.endswith(".ckpt") else 0

    # ---- loading ----------------------------------------------------------------------------------------------------

    def opened(self, state: RunState | SnapshotReader, trust: bool = False) -> dict[str, Any]:
        """Return Lightning's checkpoint dict; large parts stay unread, since they may not fit into memory."""
        checkpoint = with_objects(state, trust)
        of_run = checkpoint.pop(OF_RUN, None)
        if of_run is not None and self.is_fitting():
            own = self._strategy
            where = (own.layout, own._rank, own.ranks.data_rank, own.root_device)
            self.pending = rank_state.saved_rank_state(state, of_run, *where)
            self._previously_trained = set(of_run.get("trained", ()))
            self.resumed_certificate = str(of_run.get("certificate", "")), of_run.get("compared", ())
            self._pending_kept_back = (state, of_run)
            left = of_run.get("left_behind")
            if left is not None and not self._strategy._knows_left_behind(left["of"]):
                rank_zero_warn(
                    f"Resuming from {state.path} with strategy={self._strategy.strategy_name}: {left['text']}."
                )
        lazy = (OPTIMIZERS,) if self._has_load_hooks() else (OPTIMIZERS, WEIGHTS)
        return {key: value if key in lazy else materialised(value) for key, value in checkpoint.items()}

    def open_held(self, held: Snapshot) -> SnapshotReader:
        """Open an in-memory state, joined with other ranks' parts if a hook needs whole tensors."""
        state = SnapshotReader(held)
        if self._strategy.layout.world_size == self._strategy.layout.replicate:
            return state  # every rank holds everything
        wants_wholes = self._has_load_hooks() or any(
            key.startswith(OF_CALLBACKS) and not state.is_whole(key)
            for key in state.keys()  # noqa: SIM118
        )
        return state.joined(self.all_gather_values(state.parts())) if self.any_rank(wants_wholes) else state

    def open(self, path: str) -> RunState:
        """Open a run state; ranks share the verification. A collective.

        Raises:
            CheckpointError: on every rank, as :meth:`RunState.open`.
        """
        group = self.group()
        part = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        manifest, problems, error = None, [], None
        try:
            manifest = read_manifest(path)
            problems = verify(path, manifest, part=part)
        except CheckpointError as failure:
            error = failure
        # If a rank cannot read the folder, all ranks must fail instead of waiting.
        text = None if error is None else str(error)
        found = problems_of_ranks((problems, text) if problems or error is not None else None, group)
        problems = list(dict.fromkeys(problem for problems, _ in found.values() for problem in problems))
        if error is not None:
            raise error
        for rank, (_, text) in found.items():
            if text is not None:
                raise CheckpointError(f"Rank {rank} cannot read the checkpoint: {text}")
        if problems:
            raise DamagedCheckpoint(path, problems)
        assert manifest is not None
        return RunState(path, manifest)

    def all_gather_values(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order. A collective."""
        group = self.group()
        if group is None:
            return [value]
        return all_gather_values(value, group)

    def any_rank(self, value: bool) -> bool:
        """Return whether ``value`` is true on any rank. A collective of one number."""
        return any_of_ranks(value, self.group())

    def is_fitting(self) -> bool:
        trainer = getattr(self._strategy.lightning_module, "_trainer", None)
        return trainer is not None and bool(trainer.state.fn == TrainerFn.FITTING)

    def _has_load_hooks(self) -> bool:
        """Return whether the module or a callback overrides ``on_load_checkpoint``, which may read all tensors."""
        module = self._strategy.lightning_module
        if module is None or module._trainer is None:
            return True  # opened outside of a run
        if type(module).on_load_checkpoint is not CheckpointHooks.on_load_checkpoint:
            return True
        callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        return any(type(callback).on_load_checkpoint is not Callback.on_load_checkpoint for callback in callbacks)

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool, plainly: Callable[..., None]) -> None:
        """Load the weights of a checkpoint, by name, into this rank's shards.

        Args:
            checkpoint: Lightning's checkpoint dict.
            strict: refuse missing and unexpected names.
            plainly: Lightning's loading, for whole tensors.

        Raises:
            CheckpointError: if names or shapes differ and ``strict`` is set.
        """
        state = checkpoint[WEIGHTS]
        module = self._strategy.lightning_module
        if isinstance(self._strategy.precision_plugin, DoublePrecision):
            # Lightning does this after loading, which would truncate saved 64-bit values to 32 bits.
            self._strategy.precision_plugin.convert_module(module)
        if not run_state.is_stored(state):
            names = [] if strict else self._strategy._whole_keys()
            if names and not any(name in state for name in names):
                report = run_state.mismatch(names, sorted(state), [])
                raise run_state.misfit(f"The checkpoint {module.trainer.ckpt_path}", report, some_fit=False)
            plainly(checkpoint, strict)
        elif run_state.can_fill(module):
            where = f"The checkpoint {module.trainer.ckpt_path}"
            run_state.fill_weights(
                module, self._strategy.placement, state, self._strategy._whole_keys(), strict=strict, where=where
            )
        else:
            plainly({**checkpoint, WEIGHTS: materialised(state)}, strict)
        for metric in (each for each in module.modules() if isinstance(each, Metric)):
            metric.to(metric.device)  # loaded states replace the earlier ones
        self._strategy._weights_changed()

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the saved state into every optimizer.

        Raises:
            CheckpointError: if the saved optimizers differ in number, kind, groups or parameters.
        """
        states, optimizers = checkpoint[OPTIMIZERS], self._strategy.optimizers
        if len(states) != len(optimizers):
            raise CheckpointError(
                f"The checkpoint holds {len(states)} optimizer(s), configure_optimizers made {len(optimizers)}. Make "
                "the same ones, or start from the weights alone with init_from=<the checkpoint>."
            )
        if all(state.get("by_name") for state in states):
            self._refuse_state_of_other_shapes(checkpoint)
            where = self._strategy.placement, self._strategy._name_of(), self._strategy._state_owners
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(run_state.optimizer_parts(optimizer, state, *where))
        else:  # an imported file identifies parameters by position
            self._strategy._load_plain_optimizers({**checkpoint, OPTIMIZERS: materialised(states)})
        for optimizer in optimizers:
            run_state.refuse_other_optimizer(optimizer)

    def _refuse_state_of_other_shapes(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse optimizer state of mismatched shapes, which cannot be skipped like weights under ``strict=False``."""
        weights = checkpoint.get(WEIGHTS, {})
        stepped = {name for state in checkpoint[OPTIMIZERS] for name in state["state"]}
        wrong = [
            f"{name}: saved {tuple(weights[name].shape)}, the module has {shape}"
            for name, shape in self._whole_shapes().items()
            if name in stepped and _is_readable(weights.get(name)) and tuple(weights[name].shape) != shape
        ]
        if wrong:
            report = run_state.mismatch((), (), wrong)
            raise CheckpointError(
                f"The checkpoint holds the optimizer's state of {report} An optimizer cannot resume from it: start "
                "from the weights alone with init_from=<the checkpoint>."
            )

    # ---- initial weights --------------------------------------------------------------------------------------------

    def load_initial_weights(self) -> None:
        """Load the weights of ``init_from`` at the end of a module's first setup, unless a checkpoint will be loaded.

        Without ``init_from``, the module's attribute ``initial_weights`` gives the path; it is reset to ``None`` once
        loaded. A module's method ``weights_as_held(source)`` converts a ``TensorSource`` to the module's own format.
        """
        module = self._strategy.lightning_module
        own = getattr(module, "initial_weights", None)
        if own is not None:
            self.init_from = self.init_from or str(own)
            module.initial_weights = None  # type: ignore[assignment]
        is_first, self._initialized = self._initialized is not module, module
        if self.init_from is None or not is_first or module.trainer.ckpt_path is not None:
            return
        source: TensorSource
        if holds_run_state(self.init_from):
            # Matched by name too: an imported state has the names of its origin.
            source = SavedWeights(self.open(self.init_from))
        else:
            source = SafetensorsFolder(self.init_from)
            converted: Any = getattr(module, "weights_as_held", None)
            source = source if converted is None else converted(source)
        self.load_weights(source, {}, strict=bool(module.strict_loading))

    def load_weights(self, source: TensorSource, names: Mapping[str, str], strict: bool = True) -> None:
        """Load weights from ``source``; each rank reads its shards.

        Args:
            source: of the tensors.
            names: name in the module -> name in the source; empty: matched by
                :func:`~trainwright.checkpoint.format.names.match_names`.
            strict: refuse missing, unexpected and mismatched tensors.

        Raises:
            CheckpointError: if the tensors do not match.
        """
        module = self._strategy.lightning_module
        where = str(self.init_from or "The source")
        expected = self._strategy._whole_keys()
        if not names:
            shapes, tied = self._whole_shapes(), tied_names(module)
            adapters = self._strategy.placement.united(adapter_tensors(module))
            options: Any = {"strict": strict, "where": where, "say": rank_zero_warn}
            names = match_names(shapes, source, tied=tied, adapters=adapters, **options)
            if any(name not in names for name in adapters):
                refuse_weights_under_adapters(module, where)
            # match_names reports unmatched tensors; a module's extra state is no tensor.
            expected = [*names, *(key for key in expected if key not in shapes)]
        state = {name: StoredTensor(source, key) for name, key in names.items()}
        run_state.fill_weights(module, self._strategy.placement, state, expected, strict=strict, where=where)
        self._strategy._weights_changed()

    def _whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole module's ``state_dict``. A collective of stages."""
        held = self._strategy.lightning_module.state_dict()
        mine = {
            name: list(self._strategy.placement.boxes(name, value).shape)
            for name, value in held.items()
            if isinstance(value, Tensor)
        }
        return {name: tuple(shape) for name, shape in self._strategy.placement.united(mine).items()}

    # ---- state of each rank -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Restore the rank state when training starts, and warn of frozen parameters."""
        self._strategy.placement.refuse_renamed(self._strategy.lightning_module)
        self._warn_of_frozen()
        self.restore()

    def _trained(self) -> set[str]:
        return {
            name for name, parameter in self._strategy.lightning_module.named_parameters() if parameter.requires_grad
        }

    def _warn_of_frozen(self) -> None:
        """Warn of parameters that are no longer trained: unfreezing at the start of an epoch is not repeated."""
        names = {name for name, _ in self._strategy.lightning_module.named_parameters()}
        frozen = sorted((self._previously_trained & names) - self._trained())
        self._previously_trained = set()
        if frozen:
            rank_zero_warn(
                f"The saved run trained {len(frozen)} parameter(s) that are frozen now: {run_state.listed(frozen)}. "
                "They keep the values of the checkpoint. To train them, unfreeze them (requires_grad_(True)) when the "
                "module is built; a finetuning callback does so only at the start of an epoch."
            )

    def restore(self) -> None:
        """Restore random number generators and this rank's buffers from the loaded checkpoint, if any.

        Called when training starts, and again after resuming data mid-epoch, which draws random numbers.
        """
        if self._pending_kept_back is not None:
            pending, self._pending_kept_back = self._pending_kept_back, None
            self._strategy.averaging.keep_back(*pending)
        if self.pending is None:
            return
        set_random_state(self.pending, self._strategy.root_device)
        for key, value in self.pending.items():
            if key.startswith(BUFFERS):
                self._strategy.lightning_module.get_buffer(key.removeprefix(BUFFERS)).copy_(value)


def _is_readable(value: Any) -> bool:
    """Return whether ``value`` is a tensor that this rank can read, not another stage's in an in-memory state."""
    return value is not None and (not isinstance(value, StoredTensor) or value.key in value.source.keys())  # noqa: SIM118
