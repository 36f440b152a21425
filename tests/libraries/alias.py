"""Have ``pytorch_lightning`` be ``lightning.pytorch``, except in the process of the reference.

Import this before a library that subclasses the classes of ``pytorch_lightning``. The reference trains with the Trainer
of that package.
"""

import os

from tests.libraries.environments import REFERENCE

if REFERENCE not in os.environ:
    import trainwright.pytorch_lightning_alias  # noqa: F401
