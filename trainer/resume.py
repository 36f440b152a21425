"""Choice of the checkpoint for `ckpt_path="last"` and `ckpt_path="auto"`.

Lightning takes the file written last, whatever it contains. Here ranks verify the newest checkpoint against its
manifest, as the strategy does with every checkpoint, and fall back to older ones with a warning that names the damaged
file and its writer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from trainwright.callbacks.guard.verdict import keeps_its_state
from trainwright.callbacks.save.run_state import RunStateCheckpoint
from trainwright.checkpoint.exchange.distinct import broadcast_value
from trainwright.checkpoint.memory.snapshots import Snapshot
from trainwright.checkpoint.read.candidates import AUTO, LAST, Candidate, candidate_at, candidates_of, newest_first
from trainwright.checkpoint.store.paths import join_path
from trainwright.core.errors import CheckpointError, DamagedCheckpoint
from trainwright.core.failures.error_text import is_refusal, is_secondary, own_place
from trainwright.core.lightning_internals import _BaseProgress, _CheckpointConnector, _Loop
from trainwright.core.run.peers import peers_of, service_of
from trainwright.core.run.run_directory import CHECKPOINTS
from trainwright.core.text.bounded import ContentError, interpreting, natural

if TYPE_CHECKING:
    from trainwright.trainer.contract import RunTrainer

T = TypeVar("T")


def search_folders(trainer: RunTrainer, folders: Sequence[str]) -> None:
    """Let `ckpt_path="last"` and `"auto"` search other folders than those that the trainer saves in.

    Args:
        trainer: before its run.
        folders: local or remote, in order of precedence.
    """
    trainer._checkpoint_connector.folders = tuple(folders)


class ResumeConnector(_CheckpointConnector):
    """Chooses the checkpoint once ranks can communicate; Lightning chooses earlier.

    Attributes:
        folders: to search, in order of precedence; empty: those that the trainer's callbacks save in.
        weights_only: as given to ``fit`` etc.; Lightning drops it for strategies that restore late.
    """

    trainer: RunTrainer

    def __init__(self, trainer: RunTrainer) -> None:
        super().__init__(trainer)
        self.folders: Sequence[str] = ()
        self.weights_only: bool | None = None

    def _select_ckpt_path(
        self, state_fn: TrainerFn, ckpt_path: Any, model_provided: bool, model_connected: bool
    ) -> Any:
        if service_of(self.trainer.strategy).serves:
            return None  # a server has none; the workers send its state
        path = super()._select_ckpt_path(state_fn, ckpt_path, model_provided, model_connected)
        # Strategies that restore late check before whether there is a checkpoint; it must not be that of the last run.
        self._ckpt_path = None if path in (LAST, AUTO) else path
        return path

    def _parse_ckpt_path(self, state_fn: TrainerFn, ckpt_path: Any, model_provided: bool, model_connected: bool) -> Any:
        if ckpt_path in (LAST, AUTO) or isinstance(ckpt_path, Snapshot):
            return ckpt_path
        if ckpt_path is None and model_provided and state_fn != TrainerFn.FITTING:
            rank_zero_info(f"{state_fn.value} without ckpt_path: with the weights that the module has now.")
        return super()._parse_ckpt_path(state_fn, ckpt_path, model_provided, model_connected)

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Load the checkpoint, after choosing it for ``"last"`` and ``"auto"``.

        Raises:
            CheckpointError: if there are checkpoints but none is good (``"last"`` only: ``"auto"`` starts from
                scratch).
        """
        weights_only = self.weights_only if weights_only is None else weights_only
        if checkpoint_path in (LAST, AUTO):
            self._load_newest_good(str(checkpoint_path), weights_only)
        else:
            super().resume_start(checkpoint_path, weights_only)

    def _restore_modules_and_callbacks(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        with self.restoring():
            super()._restore_modules_and_callbacks(checkpoint_path, weights_only)

    def restore_training_state(self) -> None:
        """Restore precision, loops, optimizers and schedulers.

        Raises:
            CheckpointError: if their states are invalid.
        """
        with self.restoring():
            super().restore_training_state()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Raise :class:`CheckpointError` for errors that a malformed state causes outside of user code."""
        try:
            yield
        except Exception as error:
            is_explained = is_refusal(error) and not isinstance(error, ContentError)
            if is_explained or is_secondary(error) or own_place(error):
                raise
            with interpreting(str(self._ckpt_path), problem="holds a state that does not fit this run"):
                raise

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the state of the run, after ranks have made equal what they share. A collective."""
        peers_of(self.trainer.strategy).share()
        checkpoint: dict[str, Any] = super().dump_checkpoint(weights_only)
        return checkpoint

    def restore_loops(self) -> None:
        """Restore the loops.

        Raises:
            ValueError: if the checkpoint has more optimizer steps than ``max_steps``.
            ContentError: if its counters are not numbers.
        """
        super().restore_loops()
        trainer = self.trainer
        _check_counters(trainer.fit_loop)
        if trainer.state.fn == TrainerFn.FITTING and 0 <= trainer.max_steps < trainer.global_step:
            raise ValueError(
                f"max_steps={trainer.max_steps}, but the checkpoint {self._ckpt_path} has {trainer.global_step} "
                f"optimizer steps already. Set max_steps above {trainer.global_step}, or choose an earlier checkpoint."
            )

    def roll_back(self, held: Snapshot) -> None:
        """Restore an in-memory state of this rank within a fit. A collective.

        Some callbacks keep their state, see :func:`~trainwright.callbacks.guard.verdict.keeps_its_state`.

        Raises:
            CheckpointError: if the state is of another module or layout.
        """
        checkpoint = self.trainer.strategy.load_checkpoint(held)  # type: ignore[arg-type]
        keep = {each.state_key for each in self.trainer.callbacks if keeps_its_state(each)}  # type: ignore[attr-defined]
        states = checkpoint.get("callbacks", {})
        checkpoint["callbacks"] = {key: state for key, state in states.items() if key not in keep}
        self._loaded_checkpoint = checkpoint
        try:
            self.restore_datamodule()
            self.restore_model()
            self.restore_callbacks()
            self.restore_training_state()
        finally:
            self._loaded_checkpoint = {}

    # ---- choosing -----------------------------------------------------------------------------------------------

    def _load_newest_good(self, word: str, weights_only: bool | None) -> None:
        rejected: list[str] = []
        for candidate in self._agreed(self._candidates):
            problem = self._problem(candidate, weights_only)
            if problem is None:
                log = rank_zero_warn if rejected else rank_zero_info  # not the one that the command has named
                log(f"ckpt_path={word!r}: resuming {candidate.path}")
                self._ckpt_path = candidate.path
                return
            rejected.append(f"{candidate.path}: {problem}")
            rank_zero_warn(f"ckpt_path={word!r}: skipped {rejected[-1]}")
        self._start_from_scratch(word, rejected)

    def _problem(self, candidate: Candidate, weights_only: bool | None) -> str | None:
        """Load a checkpoint, or return why not, equal on every rank."""
        for_fit = self.trainer.state.fn == TrainerFn.FITTING
        problem = self._agreed(partial(candidate.problem, for_fit=for_fit))
        if problem is not None:
            return problem
        try:
            super().resume_start(candidate.path, weights_only)
        except DamagedCheckpoint as error:
            return "; ".join(error.problems)
        return None

    def _start_from_scratch(self, word: str, rejected: Sequence[str]) -> None:
        if rejected and word == LAST:
            raise CheckpointError(
                f"ckpt_path={word!r}: there is no good checkpoint; skipped:\n  " + "\n  ".join(rejected) + "\n"
                "Give the path of another one, or remove ckpt_path (or type 'auto') to start from scratch."
            )
        super().resume_start(None)
        where = ", ".join(self._folders()) or "no callback saves any"
        text = (
            f"ckpt_path={word!r}: there is no {'good ' if rejected else ''}checkpoint ({where}). "
            "No checkpoint will be loaded; starting from scratch."
        )
        report = rank_zero_warn if rejected or word == LAST else rank_zero_info
        report(text)

    def _candidates(self) -> list[Candidate]:
        """Return candidates, newest first; with several folders in their order."""
        if self.folders:
            return list(candidates_of(self.folders))
        found = {os.path.realpath(each.path): each for each in candidates_of(self._folders())}
        for candidate in self._candidates_of_lightning():
            found.setdefault(os.path.realpath(candidate.path), candidate)
        return newest_first(found.values())

    def _folders(self) -> list[str]:
        if self.folders:
            return list(self.folders)
        callbacks = [each for each in self.trainer.checkpoint_callbacks if isinstance(each, RunStateCheckpoint)]
        default = join_path(str(self.trainer.default_root_dir), CHECKPOINTS)
        return list(dict.fromkeys(callback.dirpath or default for callback in callbacks))

    def _candidates_of_lightning(self) -> Iterator[Candidate]:
        """Yield Lightning's candidates."""
        trainer: Any = self.trainer
        savers = [each for each in trainer.callbacks if isinstance(each, OnExceptionCheckpoint)]
        paths = {str(each.ckpt_path) for each in savers}
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                paths |= set(map(str, callback._find_last_checkpoints(trainer)))
        for path in sorted(filter(None, paths)):
            store = get_filesystem(path)
            if store.exists(path):
                yield candidate_at(path, store.modified(path))

    # ---- agreement ----------------------------------------------------------------------------------------------

    def _agreed(self, compute: Callable[[], T]) -> T:
        """Return rank 0's result on every rank: others may see a folder differently."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return compute()
        group = self.trainer.agreement_group()
        answer: Any = None
        if dist.get_rank(group) == 0:
            try:
                answer = compute(), None
            except (CheckpointError, OSError) as error:
                answer = None, str(error)
        found: T
        found, problem = broadcast_value(answer, 0, group)
        if problem is not None:
            raise CheckpointError(problem)
        return found


def _check_counters(node: _Loop | _BaseProgress) -> None:
    """Raise for a counter that is not a number, which Lightning would accept."""
    for value in vars(node).values():
        if isinstance(value, _Loop | _BaseProgress):
            _check_counters(value)
        elif isinstance(node, _BaseProgress):
            natural(int(value) if isinstance(value, bool) else value)
