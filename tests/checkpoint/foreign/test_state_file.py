"""Run states in one file, read by torch and Lightning, and refused when damaged."""

import io
import os
import pickle
import threading
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn

from tests.checkpoint.payload import evil
from tests.parity.harness import make_trainer
from trainwright import RunStateCheckpoint
from trainwright.checkpoint.foreign.importing import import_checkpoint
from trainwright.checkpoint.foreign.pickled_file import load_pickled
from trainwright.checkpoint.foreign.state_file import write_file
from trainwright.checkpoint.foreign.torch_file import LazyTensor, pickling_problem
from trainwright.checkpoint.format.manifest import read_manifest
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.tree import encode
from trainwright.checkpoint.read.run_state import RunState, StoredTensor, holds_run_state
from trainwright.checkpoint.write.save import Content
from trainwright.core.errors import CheckpointError, DamagedCheckpoint

W, MOMENT, OWN = torch.arange(12.0).reshape(3, 4), torch.full((3, 4), 0.5), torch.arange(5, dtype=torch.uint8)


def content() -> Content:
    tensors = {"weights/w": W, "optimizer/0/w/exp_avg": MOMENT, "rank/0/torch": OWN}
    kept = {"state_dict": {"w": W, "tied": W}, "optimizer_states": [{"state": {"w": {"exp_avg": MOMENT}}}]}
    keys = {id(W): "weights/w", id(MOMENT): "optimizer/0/w/exp_avg"}
    group = {"lr": 0.1, "params": ["w"]}
    tree = {
        **encode(kept, lambda _, tensor: keys[id(tensor)]),
        "epoch": 1,
        "global_step": 7,
        "hyper_parameters": encode({"folder": Path("a/b"), "rate": float("inf")}, lambda *_: ""),
    }
    tree["optimizer_states"][0] |= {"by_name": True, "param_groups": [group]}
    about = {"step": 7, "kind": "run state", "layout": {}}
    return Content(tree, {key: TensorParts.whole(value) for key, value in tensors.items()}, about)


def read(state: RunState) -> dict[str, Tensor]:
    return {key: state.read(key) for key in state.keys()}  # noqa: SIM118 - a source is no dict


@pytest.mark.parametrize("place", ["local", "memory://state_file"])
def test_file_for_torch_and_trainwright(tmp_path, place):
    path = f"{tmp_path if place == 'local' else place}/x.ckpt"
    write_file(content(), path)
    with fsspec.open(path, "rb") as file:
        loaded = torch.load(io.BytesIO(file.read()))  # weights_only=True is torch's default
    assert torch.equal(loaded["state_dict"]["w"], W)
    assert loaded["state_dict"]["tied"].data_ptr() == loaded["state_dict"]["w"].data_ptr()
    assert loaded["optimizer_states"][0]["param_groups"] == [{"lr": 0.1, "params": [0]}]
    assert torch.equal(loaded["optimizer_states"][0]["state"][0]["exp_avg"], MOMENT)
    assert (loaded["global_step"], loaded["hyper_parameters"]) == (7, {"folder": "a/b", "rate": float("inf")})
    assert load_pickled(path).keys() == loaded.keys()
    state = RunState.open(path)
    assert (state.about["step"], state.tree["hyper_parameters"]["folder"]) == (7, Path("a/b"))
    assert isinstance(state.tree["state_dict"]["w"], StoredTensor)
    found = read(state)
    assert found.keys() == {"weights/w", "optimizer/0/w/exp_avg", "rank/0/torch"}
    assert torch.equal(found["rank/0/torch"], OWN)
    assert torch.equal(state.read("weights/w", (1, 1), (2, 2)), W[1:3, 1:3])


def test_import_into_a_folder(tmp_path):
    write_file(content(), str(tmp_path / "x.ckpt"))
    import_checkpoint(str(tmp_path / "x.ckpt"), tmp_path / "folder")
    folder, file = (RunState.open(str(tmp_path / name)) for name in ("folder", "x.ckpt"))
    assert folder.plain_tree == file.plain_tree
    found = read(folder)
    assert all(torch.equal(value, found[key]) for key, value in read(file).items())


def test_replacement_is_atomic(tmp_path, monkeypatch):
    path = str(tmp_path / "x.ckpt")
    import_checkpoint(_written(tmp_path / "other.ckpt"), path)  # a folder, as another layout leaves it
    write_file(content(), path)
    assert Path(path).is_file()
    before = Path(path).read_bytes()
    monkeypatch.setattr(LazyTensor, "nbytes", property(lambda _: 1 << 62))
    with pytest.raises(CheckpointError, match="free"):
        write_file(content(), path)
    monkeypatch.undo()
    broken = content()
    broken.tensors["weights/w"] = TensorParts((3, 4), torch.float32, [((0, 0), W[:2])])
    with pytest.raises(CheckpointError, match="holds 8 of the 12 elements of weights/w"):
        write_file(broken, path)
    assert Path(path).read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["other.ckpt", "x.ckpt"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(CheckpointError, match=r"thesis\.txt"):
        write_file(content(), str(tmp_path / "mine"))


def _written(path: Path) -> str:
    write_file(content(), str(path))
    return str(path)


@pytest.mark.parametrize("record", ["data/0", "data/2", "data.pkl", "state.json", "tensors.json", "manifest.json"])
def test_flipped_bits_are_found(tmp_path, record):
    path = _written(tmp_path / "x.ckpt")
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"archive/{record}")
        data = archive.read(info)
    whole = bytearray(Path(path).read_bytes())
    at = whole.index(data, info.header_offset) + info.file_size // 2
    whole[at] ^= 4
    Path(path).write_bytes(whole)
    assert holds_run_state(path)
    with pytest.raises(DamagedCheckpoint, match=record.replace("/", r"\.")):
        RunState.open(path)


def test_incomplete_files_are_damaged(tmp_path):
    path = _written(tmp_path / "x.ckpt")
    _rewritten(path, {"manifest.json": None})
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        RunState.open(path)
    path = _written(tmp_path / "x.ckpt")
    Path(path).write_bytes(Path(path).read_bytes()[:-40])
    with pytest.raises(DamagedCheckpoint, match="is truncated"):
        load_pickled(path)
    path = _written(tmp_path / "x.ckpt")
    _rewritten(path, {}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed"):
        RunState.open(path)


def _rewritten(path: str, exchanged: dict[str, bytes | None], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in records.items():
            data = exchanged.get(name.partition("/")[2], data)  # type: ignore[assignment]
            if data is not None:
                new.writestr(name, data)


def test_pickles_never_run(tmp_path):
    """Neither one that was put in later nor one whose hash its writer knew."""
    path, touch = _written(tmp_path / "x.ckpt"), tmp_path / "touched"
    buffer = io.BytesIO()
    torch.save({"state_dict": evil(touch)}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    _rewritten(path, {"data.pkl": data})
    with pytest.raises(DamagedCheckpoint, match=r"data\.pkl"):
        RunState.open(path)
    state = RunState(path, read_manifest(path))
    assert torch.equal(read(state)["weights/w"], W)
    assert state.tree["global_step"] == 7
    with pytest.raises(CheckpointError, match="trust"):
        load_pickled(path)
    assert not touch.exists()


def _loaded_and_saved(path: Path) -> Any:
    torch.save(torch.load(path), path)


def test_resaved_file_is_an_ordinary_file(tmp_path):
    path = _written(tmp_path / "x.ckpt")
    _loaded_and_saved(Path(path))
    assert not holds_run_state(path)
    assert torch.equal(load_pickled(path)["state_dict"]["w"], W)


# ---- Objects --------------------------------------------------------------------------------------------------------


class Scale:
    """An object as libraries put into checkpoints, with a tensor of the module."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Keeping(ModelCheckpoint):
    """Has an object in its state."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        self.scale: Any = Scale(2.0)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.scale = state["scale"]


class Library(BoringModel):
    """Has classes and modules among its hyper-parameters, and adds objects to checkpoints."""

    def __init__(self, predictor: Any = None, function: Any = None, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen: dict[str, Any] = {}
        self.added: Any = {"normalizer": Scale(self.layer.weight), "means": np.ones(2)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["dataset"], checkpoint["loss"] = self.added, nn.PReLU(2)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = {key: checkpoint.get(key) for key in ("dataset", "loss", "callbacks")}


@pytest.fixture
def of_library(tmp_path: Path) -> str:
    module = Library({"cls": Library, "metrics": [nn.MSELoss()]}, lambda: None)
    trainer_of(Keeping(tmp_path)).fit(module)
    return str(tmp_path / "step=1.ckpt")


def trainer_of(*callbacks: Any, steps: int = 1, **options: Any) -> Any:
    options = {"enable_checkpointing": bool(callbacks), "limit_val_batches": 0, **options}
    return make_trainer("single", max_steps=steps, callbacks=list(callbacks), **options)


def test_pickle_holds_objects_as_lightnings(of_library: str) -> None:
    with pytest.raises(pickle.UnpicklingError):
        torch.load(of_library)
    loaded = torch.load(of_library, weights_only=False)
    assert loaded["hyper_parameters"]["predictor"]["cls"] is Library
    assert isinstance(loaded["hyper_parameters"]["predictor"]["metrics"][0], nn.MSELoss)
    assert loaded["hyper_parameters"].keys() == {"predictor", "width"}
    assert isinstance(loaded["loss"].weight, nn.Parameter)
    assert isinstance(loaded["dataset"]["means"], np.ndarray)
    weight = loaded["state_dict"]["layer.weight"]
    assert loaded["dataset"]["normalizer"].value.data_ptr() == weight.data_ptr()
    (scale,) = [state["scale"] for state in loaded["callbacks"].values() if "scale" in state]
    assert (type(scale), scale.value) == (Scale, 2)
    found = Library.load_from_checkpoint(of_library, weights_only=False)
    assert (found.hparams.predictor["cls"], found.seen["dataset"]["normalizer"].value.shape) == (Library, weight.shape)
    RunState.open(of_library)


def test_objects_are_read_only_if_trusted(of_library: str, tmp_path: Path) -> None:
    for refused in (
        lambda: trainer_of(steps=2).fit(Library(), ckpt_path=of_library),
        lambda: trainer_of().test(Library(), ckpt_path=of_library, verbose=False),
        lambda: Library.load_from_checkpoint(of_library),
    ):
        with pytest.raises(CheckpointError, match=r"objects into .'callbacks', 'dataset', 'loss'.*trust=true.*=False"):
            refused()
    saver, module = Keeping(tmp_path), Library()
    saver.scale = None
    trainer_of(saver, steps=2).fit(module, ckpt_path=of_library, weights_only=False)
    assert saver.scale.value == 2
    assert isinstance(module.seen["loss"], nn.PReLU)
    assert module.seen["dataset"]["normalizer"].value.shape == module.layer.weight.shape


def test_hyper_parameters_need_no_trust(tmp_path: Path) -> None:
    trainer_of().fit(module := BoringModel())
    module.save_hyperparameters({"kind": Library, "width": 3})
    module.trainer.save_checkpoint(path := str(tmp_path / "x.ckpt"))
    trainer_of(steps=2).fit(BoringModel(), ckpt_path=path)
    assert torch.load(path, weights_only=False)["hyper_parameters"] == {"kind": Library, "width": 3}


def test_objects_that_cannot_be_saved(tmp_path: Path) -> None:
    module = Library()
    trainer_of().fit(module)
    module.trainer.strategy.options.one_file = False
    with pytest.raises(CheckpointError, match=r"dataset/normalizer is a .*\.Scale.*ends in \.ckpt.*one_file=True"):
        module.trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"dataset/normalizer is a "):
        trainer_of(RunStateCheckpoint(str(tmp_path), every_n_steps=1)).fit(Library())
    module.trainer.strategy.options.one_file = None
    module.added = threading.Lock()
    with pytest.raises(CheckpointError, match=r"dataset of the checkpoint cannot be pickled: TypeError: cannot.*lock"):
        module.trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == []


def test_parts_of_tensors_are_not_pickled() -> None:
    part = torch.ones(4)
    for value, held in (part, {part.data_ptr(): None}), (torch.ones(2, device="meta"), {}):
        assert "other ranks hold parts" in str(pickling_problem(Scale(value), held))
    assert pickling_problem(Scale(part), {}) is None
