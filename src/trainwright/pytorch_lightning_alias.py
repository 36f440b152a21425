"""One package of Lightning for libraries that import ``pytorch_lightning``: import this module before them.

``pytorch_lightning`` and ``lightning_fabric`` become other names of the modules ``lightning.pytorch`` and
``lightning.fabric``, so their classes are the same. Raises an ``ImportError`` if one of them is imported already, or
installed in another version than ``lightning``. The command line does this by itself.
"""

import importlib

from trainwright.core.config.lightning_alias import use_alias

__all__ = ["use_trainer"]


def use_trainer() -> None:
    """Replace ``lightning.pytorch.Trainer`` by ``trainwright.Trainer``, for libraries that build a Trainer themselves.

    Call it before their import; a name that was imported from Lightning before stays Lightning's.
    """
    from trainwright.trainer.trainer import Trainer

    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.trainer"):
        importlib.import_module(name).Trainer = Trainer  # type: ignore[attr-defined]


use_alias()
