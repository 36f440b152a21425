"""States of a wrong form under valid hashes: a run restores them, or says in one paragraph that it cannot."""

import random
import shutil
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tests.security.deadlines import deadline
from tests.security.mutations import forge_file
from tests.trainer.test_resume import Small, loader, trainer_of
from trainwright import RunStateCheckpoint
from trainwright.checkpoint.format.records import STATE
from trainwright.core.errors import CheckpointError
from trainwright.core.failures.error_text import is_refusal

ATTEMPTS = 60


class Scheduled(Small):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def resume(path: Path, folder: Path) -> str | None:
    """Resume and return the forbidden error; ``None``: it refused; ``""``: it resumed."""
    callbacks = [EarlyStopping("norm", strict=False), ModelCheckpoint(folder)]
    trainer = trainer_of("single", folder, 3, callbacks=callbacks, limit_val_batches=0)
    try:
        with deadline(20):
            trainer.fit(Scheduled(), loader(), ckpt_path=str(path))
    except CheckpointError as error:
        return None if path.name in str(error) and "\n\n" not in str(error) else f"no paragraph: {error}"
    except (Exception, SystemExit) as error:
        if is_refusal(error):
            return None
        return "".join(traceback.format_exception(error, limit=-6))
    return ""


def test_junk_in_the_state_of_a_run(tmp_path: Path) -> None:
    """60 attempts, seeded: one to three values of the state exchanged, removed, moved or renamed."""
    good, forged = tmp_path / "good", tmp_path / "forged.ckpt"
    saver = RunStateCheckpoint(str(good), every_n_steps=1)
    callbacks = [EarlyStopping("norm", strict=False), ModelCheckpoint(tmp_path / "best"), saver]
    warnings.simplefilter("ignore")
    trainer_of("single", good, 1, callbacks=callbacks).fit(Scheduled(), loader(), loader())
    [checkpoint] = good.iterdir()
    wrong, refused = [], 0
    for attempt in range(ATTEMPTS):
        shutil.rmtree(forged, ignore_errors=True)
        shutil.copytree(checkpoint, forged)
        forge_file(forged, STATE, random.Random(attempt))
        problem = resume(forged, tmp_path / "resumed")
        wrong += [f"attempt {attempt}: {problem}"] if problem else []
        refused += problem is None
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:20])
    assert ATTEMPTS / 4 < refused < ATTEMPTS
