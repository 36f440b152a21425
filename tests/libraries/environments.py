"""Environments of the libraries: what is installed for each, beside the packages of the interpreter that makes it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.peers.environments import Environment

# Shared by all; a library that excludes them is installed without its dependencies, which are named instead.
SHARED = ("torch", "lightning", "pytorch-lightning", "torchmetrics")
TORCHVISION = "torchvision==0.28.0"
# The registry has torchvision for CUDA only. Beside a torch for the CPU its compiled operators don't load, and it can't
# be imported, since it describes two of them to torch. Declare these; models and transforms don't call them.
_DECLARE_OPERATORS = """
from importlib.util import find_spec
from pathlib import Path
import torch
if torch.version.cuda is None:
    file = Path(find_spec("torchvision").origin)
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    declared = [f'torch.library.define("torchvision::{name}", "{schema}")' for name in ("nms", "qnms")]
    file.write_text("\\n".join(["import torch", *declared, file.read_text()]))
"""
# So has it torchaudio, which works without its compiled operators where it does not find them.
_HIDE_OPERATORS = """
from importlib.util import find_spec
from pathlib import Path
import torch
folder = Path(find_spec("torchaudio").origin).with_name("lib")
if torch.version.cuda is None:
    folder.rename(folder.with_name("lib_of_cuda"))
"""
# Environment variable of the processes that train the reference.
REFERENCE = "TRAINWRIGHT_LIBRARIES_REFERENCE"


def default_cache() -> Path:
    """``~/.cache/trainwright/libraries``."""
    return Path.home() / ".cache" / "trainwright" / "libraries"


_library = partial(Environment, constraints=Path(__file__).parent / "constraints")
_vision = partial(_library, requests=(TORCHVISION,), prepare=_DECLARE_OPERATORS)

# File of rows -> environment, which has the name of the package.
LIBRARIES: dict[str, Environment] = {
    "lightly": _vision("lightly"),
    "segmentation_models": _vision("segmentation-models-pytorch"),
    "timm_models": _vision("timm"),
    "pytorch_forecasting": _library("pytorch-forecasting"),
    "scvi": _library("scvi-tools"),
    "chemprop": _library("chemprop"),
    # It asks for older versions of huggingface-hub and jsonargparse than transformers and this project.
    "litgpt": _library("litgpt", alone=("litgpt",)),
    "neuralforecast": _library("neuralforecast"),
    "darts": _library("darts"),
    "gluonts": _library("gluonts"),
    # It asks for older versions of several packages.
    "pytorch_tabular": _library(
        "pytorch-tabular",
        requests=("category-encoders", "einops", "pytorch-tabnet", "matplotlib", "scikit-base"),
        alone=("pytorch-tabular",),
    ),
    "matgl": _library("matgl"),
    "torchgeo": _vision("torchgeo"),
    "rl4co": _library("rl4co"),
    # GraphGym is configured by yacs.
    "torch_geometric": _library("torch-geometric", requests=("yacs",)),
    # Transformers of monai need einops.
    "monai": _library("monai", requests=("einops",)),
    "anomalib": _vision("anomalib"),
    "uq_box": _vision("lightning-uq-box"),
    "pyannote": _library("pyannote-audio", prepare=_HIDE_OPERATORS),
    "torch_uncertainty": _vision("torch-uncertainty"),
    "schnetpack": _library("schnetpack"),
    "torchmd": _library("torchmd-net"),
    "lifestream": _library("pytorch-lifestream"),
    # It imports pkg_resources, which later versions of setuptools lack.
    "careamics": replace(_vision("careamics"), requests=(TORCHVISION, "setuptools<81")),
    "nequip": _library("nequip"),
    "cellarium": _library("cellarium-ml"),
    "terratorch": _vision("terratorch"),
    "asteroid": _library("asteroid"),
    "deeplay": _vision("deeplay"),
    "speechbrain": _library("speechbrain"),
    "spatiotemporal": _library("torch-spatiotemporal"),
    "uni2ts": _library("uni2ts"),
    "pytorch_frame": _library("pytorch-frame"),
}
