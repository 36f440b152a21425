"""What every strategy can do with checkpoints: write the run state, read any, and begin from foreign weights."""

from __future__ import annotations

import platform
import weakref
from collections.abc import Callable, Mapping
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

from trainwright.checkpoint.exchange.distinct import all_gather_values, any_of_ranks, problems_of_ranks
from trainwright.checkpoint.exchange.groups import WorldGroup
from trainwright.checkpoint.foreign.hugging_face import (
    adapter_tensors,
    hugging_face_facts,
    peft_facts,
    refuse_weights_under_adapters,
)
from trainwright.checkpoint.foreign.safetensors_folder import SafetensorsFolder
from trainwright.checkpoint.foreign.state_file import write_file
from trainwright.checkpoint.format.manifest import read_manifest, verify
from trainwright.checkpoint.format.names import match_names, tied_names
from trainwright.checkpoint.format.source import TensorSource
from trainwright.checkpoint.memory.snapshots import Snapshot, SnapshotReader
from trainwright.checkpoint.read.run_state import RunState, SavedWeights, StoredTensor, holds_run_state, materialised
from trainwright.checkpoint.store.paths import normal_path
from trainwright.checkpoint.write.save import Content, write
from trainwright.core.errors import CheckpointError, DamagedCheckpoint
from trainwright.strategies.contract.collectives.ranks import Ranks
from trainwright.strategies.contract.part import Host
from trainwright.strategies.contract.randomness.state import random_state, set_random_state
from trainwright.strategies.state import rank_state, run_state
from trainwright.strategies.state.assemble import StateOwners
from trainwright.strategies.state.collector import OF_CALLBACKS, Collector
from trainwright.strategies.state.placement import Placement
from trainwright.strategies.state.rank_state import BUFFERS, COMPRESSION, KeptBack
from trainwright.strategies.state.run_state import OPTIMIZERS, WEIGHTS

# Key of what this project adds to Lightning's dict of a run.
OF_RUN = "trainwright"
# Read once: a package's metadata takes milliseconds, in which training would stand still at each save.
_version = cache(version)


class KeepsBack(Protocol):
    """What of a strategy may keep back a part of what it sends, see :class:`KeptBack`."""

    def kept_back(self, complete: bool) -> KeptBack: ...

    def keep_back(self, state: RunState | SnapshotReader, of_run: Mapping[str, Any]) -> None: ...


class HasKey(Protocol):
    """A certificate, which holds for the layout and the code that its key names; empty without one."""

    key: str


class Kept(Host, Protocol):
    """What a strategy says of what its ranks hold, so that it can be kept."""

    strategy_name: str
    saves_one_file: bool

    @property
    def averaging(self) -> KeepsBack: ...

    ranks: Ranks

    @property
    def certificate(self) -> HasKey: ...

    @property
    def placement(self) -> Placement: ...

    @property
    def _rank(self) -> int: ...

    @property
    def _state_owners(self) -> StateOwners | None: ...

    def _name_of(self) -> Callable[[Tensor], str]: ...

    def _whole_keys(self) -> list[str]: ...

    def _own_buffers(self) -> dict[str, Tensor]: ...

    def _load_plain_optimizers(self, checkpoint: Mapping[str, Any]) -> None: ...

    def _knows_left_behind(self, of: str) -> bool: ...

    def _weights_changed(self) -> None: ...


class RunStates:
    """The part of a strategy that makes checkpoints which any layout writes and any other reads.

    A checkpoint is a folder, see :mod:`trainwright.checkpoint`, or one file where every rank holds all
    (``saves_one_file``).

    Args:
        strategy: whose ranks hold what is kept.
        init_from: weights to begin from when no checkpoint is given: a safetensors file, a folder of them (as Hugging
            Face writes it) or a run state; each rank reads what it keeps. ``None`` is off.
    """

    def __init__(self, strategy: Kept, init_from: str | Path | None = None) -> None:
        self._strategy = strategy
        self.init_from = None if init_from is None else str(init_from)
        # The module that has had its initial weights: what is trained since stays as it is.
        self._begun: weakref.ref[nn.Module] | None = None
        self._checkpoint_group = WorldGroup()
        # What to put back when training begins, while that has not been done.
        self.pending: dict[str, Tensor] | None = None
        self._trained_before: set[str] = set()
        self.certified_before = ""  # what the certificate of the run that is resumed holds for
        self._pending_kept_back: tuple[RunState | SnapshotReader, Mapping[str, Any]] | None = None

    def group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks for saving alone; ``None`` where there is one rank. The first call is a collective.

        Saving in the background on a group that training uses mixes up their messages, and gloo aborts.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return self._checkpoint_group.get()

    def forget(self) -> None:
        """Let go of the group, and of what is pending: the next run may meet anew."""
        self._checkpoint_group.forget()
        self.pending = self._pending_kept_back = None

    # ---- saving -----------------------------------------------------------------------------------------------------

    def content(self, checkpoint: Mapping[str, Any], *, complete: bool = False) -> Content:
        """What this rank contributes to a checkpoint: views of its tensors, no copies. A collective.

        Args:
            checkpoint: Lightning's dict of the run, as ``dump_checkpoint`` of its connector gives it.
            complete: also what another rank would write for all (buffers, tensors in the states of callbacks), as this
                rank has it, so that it can go on from its own part alone: for
                :class:`~trainwright.checkpoint.memory.snapshots.Snapshot`, not for files.
        """
        own = self._strategy
        collector = Collector(own.lightning_module, own.placement, own._name_of(), own._state_owners, complete)
        tree = collector.collect(checkpoint, self._strategy.optimizers)
        if OPTIMIZERS in checkpoint:
            buffers = {} if complete else self._strategy._own_buffers()  # with the weights already
            kept = self._strategy.averaging.kept_back(complete)
            collector.add_of_rank(
                self._strategy._rank, {**random_state(self._strategy.root_device), **buffers, **kept.of_rank}
            )
            tree[OF_RUN] = {"layout": asdict(self._strategy.layout), "trained": sorted(self._trained())}
            if self._strategy.certificate.key:
                tree[OF_RUN]["certificate"] = self._strategy.certificate.key
            if kept.about:
                collector.tensors.update(kept.tensors)
                tree[OF_RUN][COMPRESSION] = dict(kept.about)
        return Content(tree, collector.tensors, self._about(checkpoint))

    def own_buffers(self) -> dict[str, Tensor]:
        """Buffers that differ from those of the rank that writes them, such as running statistics. A collective."""
        buffers = rank_state.saved_buffers(self._strategy.lightning_module)
        if not self.any_rank(bool(buffers)):
            return {}
        writes = self._strategy.placement.writes
        mine = {name: (rank_state.digest_of(buffer), writes(name, False)) for name, buffer in buffers.items()}
        found = self.all_gather_values(mine)
        written = {name: digest for rank in found for name, (digest, is_written) in rank.items() if is_written}
        return {f"{BUFFERS}{name}": buffer for name, buffer in buffers.items() if mine[name][0] != written[name]}

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
        """Write a run state to ``filepath``, a folder or a file; all ranks together.

        Raises:
            CheckpointError: on every rank, if one failed; what was there before is untouched.
        """
        if storage_options is not None:
            raise TypeError(
                "storage_options are for a CheckpointIO plugin of your own; a run state takes none. Leave them out, or "
                "give Trainer(plugins=[...]) the plugin that understands them."
            )
        write_to = write_file if self._strategy.saves_one_file else write
        write_to(content, str(filepath), self.group())

    # ---- loading ----------------------------------------------------------------------------------------------------

    def opened(self, state: RunState | SnapshotReader) -> dict[str, Any]:
        """Lightning's dict of the run, its larger parts unread, as the whole of it may not fit or not be here."""
        checkpoint = dict(state.tree)
        of_run = checkpoint.pop(OF_RUN, None)
        if of_run is not None and self.is_fitting():
            own = self._strategy
            where = (own.layout, own._rank, own.ranks.data_rank, own.root_device)
            self.pending = rank_state.saved_rank_state(state, of_run, *where)
            self._trained_before = set(of_run.get("trained", ()))
            self.certified_before = str(of_run.get("certificate", ""))
            self._pending_kept_back = (state, of_run)
            left = of_run.get("left_behind")
            if left is not None and not self._strategy._knows_left_behind(left["of"]):
                rank_zero_warn(
                    f"Going on from {state.path} with strategy={self._strategy.strategy_name}: {left['text']}."
                )
        late = (OPTIMIZERS,) if self._somebody_edits() else (OPTIMIZERS, WEIGHTS)
        return {key: value if key in late else materialised(value) for key, value in checkpoint.items()}

    def open_held(self, held: Snapshot) -> SnapshotReader:
        """Open a state in memory; with what other ranks hold of its tensors where somebody wants to see whole ones."""
        state = SnapshotReader(held)
        if self._strategy.layout.world_size == self._strategy.layout.replicate:
            return state  # every rank holds everything
        wants_wholes = self._somebody_edits() or any(
            key.startswith(OF_CALLBACKS) and not state.is_whole(key)
            for key in state.keys()  # noqa: SIM118
        )
        return state.joined(self.all_gather_values(state.parts())) if self.any_rank(wants_wholes) else state

    def open(self, path: str) -> RunState:
        """Open and verify a run state; the ranks share the reading. A collective.

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
        # A rank that cannot read, on a node without the folder, must not leave the others waiting.
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
        """What every rank says, in order; a collective."""
        group = self.group()
        if group is None:
            return [value]
        return all_gather_values(value, group)

    def any_rank(self, value: bool) -> bool:
        """Whether it is so on any rank; a collective of one number."""
        return any_of_ranks(value, self.group())

    def is_fitting(self) -> bool:
        trainer = getattr(self._strategy.lightning_module, "_trainer", None)
        return trainer is not None and bool(trainer.state.fn == TrainerFn.FITTING)

    def _somebody_edits(self) -> bool:
        """Whether the module or a callback has an ``on_load_checkpoint``, which may look at all tensors."""
        module = self._strategy.lightning_module
        if module is None or module._trainer is None:
            return True  # who opens it outside of a run
        if type(module).on_load_checkpoint is not CheckpointHooks.on_load_checkpoint:
            return True
        callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        return any(type(callback).on_load_checkpoint is not Callback.on_load_checkpoint for callback in callbacks)

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool, plainly: Callable[..., None]) -> None:
        """Load the weights of a checkpoint, by name, into what this rank holds of them.

        Args:
            checkpoint: Lightning's dict of the run.
            strict: refuse other names.
            plainly: does the same as Lightning does it, where whole tensors are at hand.

        Raises:
            CheckpointError: if names or shapes differ and ``strict`` is set.
        """
        state = checkpoint[WEIGHTS]
        module = self._strategy.lightning_module
        if isinstance(self._strategy.precision_plugin, DoublePrecision):
            # Lightning does so after loading: parameters of 32 bits would cut off what was saved in 64.
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
        self._strategy._weights_changed()

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Give every optimizer the part of the saved state that this rank holds.

        Raises:
            CheckpointError: if the saved optimizers were other ones, or had other groups or parameters.
        """
        states = checkpoint[OPTIMIZERS]
        made = len(self._strategy.optimizers)
        if len(states) != made:
            raise CheckpointError(
                f"The checkpoint holds {len(states)} optimizer(s), configure_optimizers made {made}. Make "
                "the same ones, or begin from the weights alone with init_from=<the checkpoint>."
            )
        if not all(state.get("by_name") for state in states):
            # An imported file knows parameters by their position.
            self._strategy._load_plain_optimizers({**checkpoint, OPTIMIZERS: materialised(states)})
            for optimizer in self._strategy.optimizers:
                run_state.refuse_other_optimizer(optimizer, "the checkpoint")
            return
        self._refuse_state_of_other_shapes(checkpoint)
        for optimizer, state in zip(self._strategy.optimizers, states, strict=True):
            where, owners = "the checkpoint", self._strategy._state_owners
            parts = run_state.optimizer_parts(
                optimizer, state, self._strategy.placement, self._strategy._name_of(), where, owners
            )
            optimizer.load_state_dict(parts)
            run_state.refuse_other_optimizer(optimizer, "the checkpoint")

    def _refuse_state_of_other_shapes(self, checkpoint: Mapping[str, Any]) -> None:
        """``strict=False`` passes over weights of another shape; the state of their optimizer cannot be passed over."""
        weights = checkpoint.get(WEIGHTS, {})
        stepped = {name for state in checkpoint[OPTIMIZERS] for name in state["state"]}
        wrong = [
            f"{name}: saved {tuple(weights[name].shape)}, the module has {shape}"
            for name, shape in self._whole_shapes().items()
            if name in stepped and _is_here(weights.get(name)) and tuple(weights[name].shape) != shape
        ]
        if wrong:
            report = run_state.mismatch((), (), wrong)
            raise CheckpointError(
                f"The checkpoint holds the optimizer's state of {report} An optimizer cannot go on with it: begin from "
                "the weights alone with init_from=<the checkpoint>."
            )

    # ---- weights from elsewhere -------------------------------------------------------------------------------------

    def begin_from_weights(self) -> None:
        """Read the weights of ``init_from``, unless a checkpoint is to be loaded; at the end of a module's first setup.

        Without ``init_from``, the attribute ``initial_weights`` of a module says where its weights are; it becomes
        ``None`` once they are there. A method ``weights_as_held(source)`` of a module gives the tensors of a file,
        a ``TensorSource``, in the form in which the module holds them.
        """
        module = self._strategy.lightning_module
        own = getattr(module, "initial_weights", None)
        if own is not None:
            self.init_from = self.init_from or str(own)
            module.initial_weights = None  # type: ignore[assignment]
        is_first = self._begun is None or self._begun() is not module
        self._begun = weakref.ref(module)
        if self.init_from is None or not is_first or module.trainer.ckpt_path is not None:
            return
        source: TensorSource
        if holds_run_state(self.init_from):
            # By name as well: an imported one has the names of its origin.
            source = SavedWeights(self.open(self.init_from))
        else:
            source = SafetensorsFolder(self.init_from)
            converted: Any = getattr(module, "weights_as_held", None)
            source = source if converted is None else converted(source)
        self.load_weights(source, {}, strict=bool(module.strict_loading))

    def load_weights(self, source: TensorSource, names: Mapping[str, str], strict: bool = True) -> None:
        """Read weights from ``source``; each rank what it holds.

        Args:
            source: where they are.
            names: name in the module -> name in the source; empty: found by
                :func:`~trainwright.checkpoint.format.names.match_names`.
            strict: refuse what is missing, unexpected or of another shape.

        Raises:
            CheckpointError: if the tensors do not fit.
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
            # What is left out was told; a module's extra state, which is no tensor, was not.
            expected = [*names, *(key for key in expected if key not in shapes)]
        state = {name: StoredTensor(source, key) for name, key in names.items()}
        run_state.fill_weights(module, self._strategy.placement, state, expected, strict=strict, where=where)
        self._strategy._weights_changed()

    def _whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the whole module's ``state_dict``. A collective of stages."""
        held = self._strategy.lightning_module.state_dict()
        mine = {
            name: list(self._strategy.placement.boxes(name, value).shape)
            for name, value in held.items()
            if isinstance(value, Tensor)
        }
        return {name: tuple(shape) for name, shape in self._strategy.placement.united(mine).items()}

    # ---- what each rank has of its own ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Draw the numbers that the saved run would have drawn next."""
        self._warn_of_frozen()
        self.restore()

    def _trained(self) -> set[str]:
        return {
            name for name, parameter in self._strategy.lightning_module.named_parameters() if parameter.requires_grad
        }

    def _warn_of_frozen(self) -> None:
        """What unfreezes at the beginning of an epoch is not called again for epochs that had begun."""
        here = {name for name, _ in self._strategy.lightning_module.named_parameters()}
        frozen = sorted((self._trained_before & here) - self._trained())
        self._trained_before = set()
        if frozen:
            rank_zero_warn(
                f"The run that saved trained {len(frozen)} parameter(s) that are frozen now: "
                f"{run_state.listed(frozen)}. They keep the values of the checkpoint. If they are to be trained, "
                "unfreeze them (requires_grad_(True)) when the module is built; a finetuning callback does so at the "
                "beginning of an epoch only."
            )

    def restore(self) -> None:
        """Put random number generators and this rank's own buffers back to where the loaded checkpoint had them.

        Called when training begins, and again where beginning to read data in mid-epoch has drawn numbers that the
        saved run had drawn before. Does nothing without a checkpoint.
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


def _is_here(value: Any) -> bool:
    """Whether there is a tensor, and this rank can see it: not that of another stage in a state in memory."""
    return value is not None and (not isinstance(value, StoredTensor) or value.key in value.source.keys())  # noqa: SIM118
