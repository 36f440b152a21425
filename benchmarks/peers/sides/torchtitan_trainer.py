"""torchtitan's own entry; its trainer takes models of its own protocol only, for which this model has no port."""

import torchtitan.train
from torchtitan.trainer import Trainer

raise RuntimeError(f"{Trainer.__name__} of {torchtitan.train.__name__} can be imported; the model has no port to it")
