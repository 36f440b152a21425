"""Which checkpoint a run goes on from, when it is not told: `ckpt_path="last"` and `ckpt_path="auto"`.

Lightning takes the file that was written last, whatever is in it. Here the ranks hold the contents of the newest
checkpoint against its manifest, as the strategy does with every checkpoint before anything of it is used, and go to the
next older one, with a warning that names the file and the rank that wrote it, until they have a good one.
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
from trainwright.core.run.peers import service_of
from trainwright.core.run.run_directory import CHECKPOINTS
from trainwright.core.text.bounded import ContentError, interpreting, natural

if TYPE_CHECKING:
    from trainwright.trainer.contract import RunTrainer

T = TypeVar("T")


def look_in(trainer: RunTrainer, folders: Sequence[str]) -> None:
    """Let `ckpt_path="last"` and `"auto"` mean the checkpoints of other folders than those that the trainer saves in.

    Args:
        trainer: that will run.
        folders: local or of a store; what the first one holds is taken before what the others hold.
    """
    trainer._checkpoint_connector.folders = tuple(folders)


class ResumeConnector(_CheckpointConnector):
    """Chooses the checkpoint once the ranks can talk to each other; Lightning chooses before.

    Attributes:
        folders: where to look, the first folder first; empty: where the callbacks of the trainer save.
        weights_only: as given to ``fit`` and its like; Lightning forgets it for strategies that restore late.
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
            return None  # such a rank has none, and what its server holds comes from the others
        path = super()._select_ckpt_path(state_fn, ckpt_path, model_provided, model_connected)
        # Strategies that restore late ask before whether there is anything to restore; the answer must not be that of
        # the run before.
        self._ckpt_path = None if path in (LAST, AUTO) else path
        return path

    def _parse_ckpt_path(self, state_fn: TrainerFn, ckpt_path: Any, model_provided: bool, model_connected: bool) -> Any:
        if ckpt_path in (LAST, AUTO) or isinstance(ckpt_path, Snapshot):
            return ckpt_path
        return super()._parse_ckpt_path(state_fn, ckpt_path, model_provided, model_connected)

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Load the checkpoint, after choosing it where it is not given.

        Raises:
            CheckpointError: if there are checkpoints, but no good one (``"last"`` only: ``"auto"`` starts afresh).
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
            CheckpointError: if their states in the checkpoint are none.
        """
        with self.restoring():
            super().restore_training_state()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Raise :class:`CheckpointError` for what a state of another form makes code raise that is not the user's."""
        try:
            yield
        except Exception as error:
            is_told = is_refusal(error) and not isinstance(error, ContentError)
            if is_told or is_secondary(error) or own_place(error):
                raise
            with interpreting(str(self._ckpt_path), problem="holds a state that does not fit this run"):
                raise

    def restore_loops(self) -> None:
        """Put the loops where the checkpoint left them.

        Raises:
            ValueError: if the checkpoint has more optimizer steps than ``max_steps``, so that nothing would be trained.
            ContentError: if counters in it are no numbers.
        """
        super().restore_loops()
        trainer = self.trainer
        _check_counters(trainer.fit_loop)
        if trainer.state.fn == TrainerFn.FITTING and 0 <= trainer.max_steps < trainer.global_step:
            raise ValueError(
                f"max_steps={trainer.max_steps}, but the checkpoint {self._ckpt_path} has {trainer.global_step} "
                f"optimizer steps already. Give a max_steps above {trainer.global_step}, or an earlier checkpoint."
            )

    def go_back(self, held: Snapshot) -> None:
        """Put everything back where it was when this rank's state was taken, within a fit. A collective.

        Callbacks that say so keep what they know, see :func:`~trainwright.callbacks.guard.verdict.keeps_its_state`.

        Raises:
            CheckpointError: if the state is not one of this module and layout.
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
        passed_over: list[str] = []
        for candidate in self._agreed(self._candidates):
            problem = self._problem(candidate, weights_only)
            if problem is None:
                say = rank_zero_warn if passed_over else rank_zero_info  # of another than the command has named
                say(f"ckpt_path={word!r}: going on from {candidate.path}")
                self._ckpt_path = candidate.path
                return
            passed_over.append(f"{candidate.path}: {problem}")
            rank_zero_warn(f"ckpt_path={word!r}: passed over {passed_over[-1]}")
        self._start_afresh(word, passed_over)

    def _problem(self, candidate: Candidate, weights_only: bool | None) -> str | None:
        """Why a checkpoint was not loaded, the same on every rank; ``None``: it was."""
        for_fit = self.trainer.state.fn == TrainerFn.FITTING
        problem = self._agreed(partial(candidate.problem, for_fit=for_fit))
        if problem is not None:
            return problem
        try:
            super().resume_start(candidate.path, weights_only)
        except DamagedCheckpoint as error:
            return "; ".join(error.problems)
        return None

    def _start_afresh(self, word: str, passed_over: Sequence[str]) -> None:
        if passed_over and word == LAST:
            raise CheckpointError(
                f"ckpt_path={word!r}: there is no good checkpoint; passed over:\n  " + "\n  ".join(passed_over) + "\n"
                "Give the path of another one, or leave ckpt_path out (or say 'auto') to start afresh."
            )
        super().resume_start(None)
        where = ", ".join(self._folders()) or "no callback saves any"
        text = (
            f"ckpt_path={word!r}: there is no {'good ' if passed_over else ''}checkpoint ({where}). "
            "No checkpoint will be loaded; starting afresh."
        )
        if passed_over or word == LAST:
            rank_zero_warn(text)
        else:
            rank_zero_info(text)

    def _candidates(self) -> list[Candidate]:
        """Newest first; those of several folders in the order of the folders."""
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
        beside = join_path(str(self.trainer.default_root_dir), CHECKPOINTS)
        return list(dict.fromkeys(callback.dirpath or beside for callback in callbacks))

    def _candidates_of_lightning(self) -> Iterator[Candidate]:
        """What Lightning would choose from."""
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

    # ---- agreeing -----------------------------------------------------------------------------------------------

    def _agreed(self, compute: Callable[[], T]) -> T:
        """What the first rank finds, on every rank: another one may see a folder a moment later."""
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
    """Lightning takes any value for a counter, and computes with it much later."""
    for value in vars(node).values():
        if isinstance(value, _Loop | _BaseProgress):
            _check_counters(value)
        elif isinstance(node, _BaseProgress):
            natural(int(value) if isinstance(value, bool) else value)
