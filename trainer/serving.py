"""What a rank does that only serves the others: of a fit what servers need, of everything else nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

if TYPE_CHECKING:
    from trainwright.trainer.contract import RunTrainer


def serve(trainer: RunTrainer, module: LightningModule) -> None:
    """Take part in what the Trainer was asked for, on a rank whose strategy ``serves``.

    For ``fit`` the module and its optimizer are built by the user's own code, as on the other ranks; then the rank
    serves until they have ended. Nothing is trained, logged, saved or evaluated here, and no callback or logger is
    called.

    Args:
        trainer: of this rank.
        module: the user's.
    """
    strategy: Any = trainer.strategy
    strategy.connect(module)
    if trainer.state.fn == TrainerFn.FITTING:
        callbacks, loggers = trainer.callbacks, trainer.loggers  # type: ignore[attr-defined]
        # A signal that tells the run to end is for the workers to obey; here it is only remembered.
        trainer._signal_connector.register_signal_handlers()
        trainer.callbacks, trainer.loggers = [], []  # type: ignore[attr-defined]
        try:
            strategy.setup_environment()
            trainer._data_connector.prepare_data()
            call._call_setup_hook(trainer)
            call._call_configure_model(trainer)
            strategy.setup(trainer)
            strategy.serve()
            trainer._teardown()
            call._call_teardown_hook(trainer)
        finally:
            trainer.callbacks, trainer.loggers = callbacks, loggers  # type: ignore[attr-defined]
    trainer.state.status = TrainerStatus.FINISHED
    trainer.state.stage = None
