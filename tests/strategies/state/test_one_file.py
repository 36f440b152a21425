"""One file for ``torch.load`` under layouts that shard the state: complete, and resumed as a folder is."""

from __future__ import annotations

import os
import warnings
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.parity.harness import Record, Saver, make_trainer
from tests.parity.layout_modules import LanguageModel, make_module
from tests.parity.layouts import LayoutCase, Texts, WholeRecorder, data_ranks, run
from tests.strategies.contract.traffic import recorded
from trainwright.checkpoint.foreign import state_file
from trainwright.checkpoint.foreign.export import export
from trainwright.checkpoint.foreign.state_file import write_file
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.tree import reference
from trainwright.checkpoint.read.run_state import RunState
from trainwright.checkpoint.write.save import Content
from trainwright.core.errors import CheckpointError
from trainwright.strategies.state import checkpointing

SAVED_AT, STEPS = 2, 4
CASE = LayoutCase("gpt2-small", optimizer="adamw", steps=STEPS, shuffle=True, trainer={"data_seed": 3})
SINGLE = (1, replace(CASE, strategy="single"))
ZERO3 = (2, replace(CASE, strategy="zero3"))
LAYOUTS: dict[str, tuple[int, LayoutCase]] = {
    "zero1": (2, replace(CASE, strategy="zero1")),
    "zero3": ZERO3,
    "zero3, offloaded": (2, replace(CASE, strategy="zero3", options={"offload": "optimizer"})),
    "tensor": (2, replace(CASE, options={"tensor": 2, "shard": 1})),
    "pipeline": (2, replace(CASE, options={"pipeline": 2, "shard": 1})),
    "tensor x shard": (4, replace(CASE, options={"tensor": 2, "shard": 2})),
    "replicate x shard": (4, replace(CASE, options={"replicate": 2, "shard": 2})),
}


def trained(case: LayoutCase, *callbacks: Any) -> Any:
    options = {"global_batch_size": case.global_batch_size, "callbacks": list(callbacks), "enable_checkpointing": True}
    trainer = make_trainer(case.strategy, dict(case.options), max_steps=case.steps, **options, **case.trainer)
    loader = DataLoader(Texts(case.samples, case.length), case.global_batch_size // data_ranks(case), shuffle=True)
    held_out = DataLoader(Texts(8, case.length), 8 // data_ranks(case))
    trainer.fit(make_module(case.network, case.optimizer), loader, held_out)
    return trainer


def save_both(case: LayoutCase, folder: str) -> tuple[Record, str]:
    """Train; return the record, and the path that ``ModelCheckpoint`` has written. Save the same state as a folder."""
    recorder = WholeRecorder()
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AT, save_top_k=-1, save_last="link")
    trained(case, recorder, Saver(f"{folder}/folder", "batch", SAVED_AT), saver)
    return recorder.record, f"{folder}/step={SAVED_AT}.ckpt"


def resume(case: LayoutCase, *paths: str) -> list[Record]:
    return [run(case, resume=path, spoil=True) for path in paths]


@pytest.fixture(scope="module")
def alone(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the content of the file of one process."""
    (number, case), folder = SINGLE, str(tmp_path_factory.mktemp("alone"))
    ((_, path),) = pool.run(save_both, number, case, folder, init_group=False)
    return torch.load(path)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_file_of_a_sharded_state(ranks, alone, tmp_path, name):
    number, case = LAYOUTS[name]
    results = ranks(save_both, number, case, str(tmp_path), timeout=120)
    path, folder = results[0][1], str(tmp_path / "folder")
    assert (tmp_path / "folder").is_dir()
    found = torch.load(path)
    assert_same(without_paths(found), without_paths(torch.load(export(folder, tmp_path / "of_folder", "lightning"))))
    assert_like(of_any_layout(found), of_any_layout(deepcopy(alone)))
    file, other = RunState.open(path), RunState.open(folder)
    assert set(file.keys()) == set(other.keys())
    assert {key.split("/")[1] for key in file.keys_under("rank/")} == {str(rank) for rank in range(number)}
    assert all(torch.equal(file.read(key), other.read(key)) for key in file.keys())  # noqa: SIM118
    loaded = LanguageModel.load_from_checkpoint(tmp_path / "last.ckpt", network=case.network, optimizer="adamw")
    last = torch.load(tmp_path / "last.ckpt")["state_dict"]
    assert all(torch.equal(value, last[key]) for key, value in loaded.state_dict().items())

    for (whole, _), (same,) in zip(results, ranks(resume, number, case, path), strict=True):
        assert same.losses == whole.losses[SAVED_AT:]
        assert_same(same.parameters, whole.parameters)
    number, case = LAYOUTS["tensor"] if name == "zero3" else ZERO3
    for of_file, of_folder in ranks(resume, number, case, path, folder, timeout=120):
        assert of_file.losses == of_folder.losses == pytest.approx(whole.losses[SAVED_AT:], rel=1e-5)
        assert_same(of_file.parameters, of_folder.parameters)


def without_paths(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in checkpoint.items() if key != "callbacks"}


def of_any_layout(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint without what it keeps for each data rank."""
    for key in ("cursor", "logged"):
        del checkpoint["loops"]["fit_loop"]["state_dict"][key]
    return without_paths(checkpoint)


def assert_same(one: Any, other: Any, at: str = "") -> None:
    """Assert that two trees are equal to the bit, in the same order."""
    assert type(one) is type(other), at
    if isinstance(one, Tensor):
        assert torch.equal(one, other), at
    elif isinstance(one, dict):
        assert list(one) == list(other), at
        for key in one:
            assert_same(one[key], other[key], f"{at}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), at
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{at}/{index}")
    else:
        assert one == other, at


def assert_like(one: Any, other: Any, at: str = "") -> None:
    """Assert that two trees differ by rounding of tensors only."""
    if isinstance(one, dict):
        assert list(one) == list(other), at
        for key in one:
            assert_like(one[key], other[key], f"{at}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), at
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_like(*pair, f"{at}/{index}")
    elif isinstance(one, Tensor):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), at
        # The bias of keys has a gradient of zero, and of what rounding leaves of it AdamW makes a whole step.
        if not at.endswith("c_attn.bias"):
            assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6, at
    else:
        assert one == other, at


# ---- File or folder -------------------------------------------------------------------------------------------------


def kinds_of(folder: str) -> dict[str, str]:
    """Return what becomes of paths, after ``best`` and its removed predecessors were checked."""
    saver = ModelCheckpoint(f"{folder}/kept", monitor="train_loss", every_n_train_steps=1, save_last=True)
    trainer = trained(ZERO3[1], saver)
    torch.load(saver.best_model_path)
    trainer.validate(ckpt_path="best", dataloaders=DataLoader(Texts(8), 4), verbose=False)
    path, kinds = f"{folder}/x.ckpt", {}

    def save(name: str, one_file: bool | None, path: str = path) -> None:
        trainer.strategy.options.one_file = one_file
        trainer.save_checkpoint(path)
        dist.barrier()
        RunState.open(path)
        kinds[name] = "file" if os.path.isfile(path) else "folder"
        dist.barrier()

    save("small", None)
    total = sum(each.nbytes for each in map(RunState.open(path).read, RunState.open(path).keys()))
    saved = checkpointing._LARGEST_FILE
    try:
        for name, limit in ("of that size", total), ("larger", total - 1), ("small again", total):
            checkpointing._LARGEST_FILE = limit
            save(name, None)
        checkpointing._LARGEST_FILE = 1
        save("always", True)
    finally:
        checkpointing._LARGEST_FILE = saved
    save("never", False)
    save("without .ckpt", None, f"{folder}/name")
    save("always, without .ckpt", True, f"{folder}/other")
    return kinds


def test_which_paths_are_files(ranks, tmp_path):
    expected = {
        "small": "file", "of that size": "file", "larger": "folder", "small again": "file", "always": "file",
        "never": "folder", "without .ckpt": "folder", "always, without .ckpt": "file",
    }  # fmt: skip
    assert ranks(kinds_of, 2, str(tmp_path)) == [expected] * 2
    assert sorted(os.listdir(tmp_path)) == ["kept", "name", "other", "x.ckpt"]
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_option_can_be_off_under_ddp(ranks, tmp_path):
    case = replace(CASE, strategy="ddp", options={"one_file": False})
    (_, path), _ = ranks(save_both, 2, case, str(tmp_path))
    assert Path(path).is_dir()
    with pytest.raises(ValueError, match="one_file=often: must be true or false, or null"):
        make_trainer("zero3", {"one_file": "often"})


# ---- What is sent ---------------------------------------------------------------------------------------------------

ROWS = 1 << 16


def content_of(rank: int) -> Content:
    """Return the boxes of a rank of ``replicate=2, shard=2``, a tensor of all ranks and one of ranks 1 and 3."""
    half = torch.arange(2 * ROWS, dtype=torch.float32)[rank % 2 * ROWS :][:ROWS]
    tensors = {
        "weights/w": TensorParts((2 * ROWS,), torch.float32, [((rank % 2 * ROWS,), half)]),
        "weights/all": TensorParts.whole(torch.ones(ROWS)),
        f"rank/{rank}/torch": TensorParts.whole(torch.full((4,), rank)),
    }
    if rank % 2:
        tensors["weights/late"] = TensorParts.whole(torch.full((ROWS,), 2.0))
    names = ("w", "all", "late")
    return Content({"state_dict": {name: reference(f"weights/{name}") for name in names}}, tensors, {})


def bytes_sent(path: str) -> int:
    with recorded() as calls:
        write_file(content_of(dist.get_rank()), path, dist.group.WORLD)
    return sum(call.elements for call in calls if call.name == "send")


def test_first_rank_receives_what_it_lacks_once(ranks, tmp_path):
    sent = ranks(bytes_sent, 4, path := str(tmp_path / "x.ckpt"))
    lacking = 2 * 4 * ROWS  # half of w, and late
    assert sent[0] == 0
    assert lacking < sum(sent) < lacking + 8000
    found = torch.load(path)["state_dict"]
    assert torch.equal(found["w"], torch.arange(2 * ROWS, dtype=torch.float32))
    assert found["all"].unique().tolist() == [1]
    assert found["late"].unique().tolist() == [2]
    assert [RunState.open(path).read(f"rank/{rank}/torch")[0] for rank in range(4)] == [0, 1, 2, 3]


def fail_to_send(path: str) -> str:
    def packed(value: Any) -> bytes:
        if dist.get_rank() == 1:
            raise MemoryError("no memory")
        return pack(value)

    pack, state_file.pack = state_file.pack, packed
    try:
        with pytest.raises(CheckpointError, match="rank 1: no memory") as error:
            write_file(content_of(dist.get_rank()), path, dist.group.WORLD)
    finally:
        state_file.pack = pack
    return str(error.value)


def test_a_rank_that_cannot_send_ends_the_save_everywhere(ranks, tmp_path):
    first, second = ranks(fail_to_send, 2, str(tmp_path / "x.ckpt"), timeout=60)
    assert first == second
    assert os.listdir(tmp_path) == []


# ---- What libraries do ----------------------------------------------------------------------------------------------


class OfLibrary(BoringModel):
    """Has a class and its own network among its hyper-parameters, and adds an object to checkpoints on one rank."""

    def __init__(self, network: Any, kind: type = dict) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = network
        self.metric = MeanMetric()
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.metric.mean_value = loss["loss"]  # keeps its graph
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            checkpoint["loss"], checkpoint["metric"] = torch.nn.PReLU(), self.metric

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append(checkpoint["loss"])


def of_library(path: str | None = None, **options: Any) -> Any:
    steps = {"max_steps": 1 if path is None else 2, "limit_val_batches": 0}
    trainer = make_trainer("zero3", options, **steps)
    trainer.fit(OfLibrary(torch.nn.Linear(32, 2), LanguageModel), ckpt_path=path, weights_only=path is None)
    return trainer


def save_under_own_names(folder: str) -> tuple[list[str], str, Any]:
    """Save with a path that differs per rank, as of a run named by the time; return what was said, and an object."""
    path, trainer = f"{folder}/{dist.get_rank()}", of_library()
    trainer.lightning_module.to("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.save_checkpoint(f"{path}.ckpt")
    with pytest.raises(CheckpointError, match=r"loss is a torch.nn.*PReLU.*ends in \.ckpt.*one_file=True") as error:
        trainer.save_checkpoint(path)
    trainer.lightning_module.on_save_checkpoint = lambda _: None
    trainer.save_checkpoint(path)
    (seen,) = of_library(f"{folder}/0.ckpt").lightning_module.seen
    return [str(each.message) for each in caught], str(error.value), type(seen).__name__


def test_objects_and_paths_of_the_first_rank(ranks, tmp_path):
    first, second = ranks(save_under_own_names, 2, str(tmp_path))
    assert (first[1], first[2]) == (second[1], second[2]) == (first[1], "PReLU")
    assert sorted(os.listdir(tmp_path)) == ["0", "0.ckpt"]
    RunState.open(str(tmp_path / "0"))
    assert any("network (" in text and "left out" in text for text in first[0])
    loaded = torch.load(tmp_path / "0.ckpt", weights_only=False)
    assert loaded["hyper_parameters"] == {"kind": LanguageModel}
    assert isinstance(loaded["loss"].weight, torch.nn.Parameter)
    assert isinstance(loaded["metric"].mean_value, Tensor)
    assert loaded["state_dict"]["layer.weight"].shape == (2, 32)
