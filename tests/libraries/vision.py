"""Import this before torchvision or a library that imports it.

The registry has torchvision for CUDA only. Beside a torch for the CPU its compiled operators don't load, and it cannot
be imported, since it describes two of them to torch. They are declared here, without an implementation: models and
transforms of pictures don't call them.
"""

from __future__ import annotations

import torch

if torch.version.cuda is None:
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
