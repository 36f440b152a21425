"""Files of Lightning and torch, loaded without running code or refused."""

import argparse
import io
import os
import pathlib
import zipfile
from typing import Any

import fsspec
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from tests.checkpoint.payload import Call, evil, pickles, torch_file
from tests.checkpoint.store.server import serving
from trainwright.checkpoint.foreign.pickled_file import load_pickled
from trainwright.core.errors import CheckpointError

TYPE_THIS = r"trust=true on the command line, or weights_only=False in Python"


def saved_bytes(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def value() -> dict[str, Any]:
    return {"state_dict": {"w": torch.arange(6.0).reshape(2, 3)}, "epoch": 3, "lr": [0.1], "none": None}


def assert_value(found: dict[str, Any]) -> None:
    assert torch.equal(found["state_dict"].pop("w"), torch.arange(6.0).reshape(2, 3))
    assert found == {"state_dict": {}, "epoch": 3, "lr": [0.1], "none": None}


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("trust", [False, True])
def test_files_of_torch(tmp_path, is_zip, trust):
    torch.save(value(), tmp_path / "x.ckpt", _use_new_zipfile_serialization=is_zip)
    assert_value(load_pickled(tmp_path / "x.ckpt", trust=trust))


def test_checkpoints_of_lightning(tmp_path):
    module = BoringModel()
    trainer = pl.Trainer(accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    found = load_pickled(tmp_path / "x.ckpt")
    assert found["global_step"] == 2
    assert torch.equal(found["state_dict"]["layer.weight"], module.layer.weight)


def test_local_files_are_mapped(tmp_path):
    torch.save(value(), tmp_path / "x.ckpt")
    weight = load_pickled(tmp_path / "x.ckpt")["state_dict"]["w"]
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    (line,) = [line for line in maps if line.endswith(f"{tmp_path}/x.ckpt")]
    begin, end = (int(address, 16) for address in line.split()[0].split("-"))
    assert begin <= weight.data_ptr() < end


@pytest.mark.parametrize("trust", [False, True])
def test_compressed_records_are_read_not_mapped(tmp_path, trust):
    """Tools that pack archives anew compress them; the bytes in the file are then not those of the tensors."""
    state = {"w": torch.randn(64, 64), "few": torch.zeros(4096), "more": torch.randn(4096)}
    torch.save(state, tmp_path / "x.ckpt")
    with zipfile.ZipFile(tmp_path / "x.ckpt") as stored, zipfile.ZipFile(tmp_path / "y.ckpt", "w", 8) as packed:
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    found = load_pickled(tmp_path / "y.ckpt", trust=trust)
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_web_server_and_stores(tmp_path):
    torch.save(value(), tmp_path / "x.ckpt")
    touch = tmp_path / "touched"
    data = torch_file(pickles(touch)["os.system, protocol 2"])
    (tmp_path / "evil.ckpt").write_bytes(data)
    for name in ("x", "evil"):
        fsspec.filesystem("memory").pipe(f"/ordinary/{name}.ckpt", (tmp_path / f"{name}.ckpt").read_bytes())
    with serving(tmp_path) as address:
        for place in (f"file://{tmp_path}", "memory://ordinary", "simplecache::memory://ordinary", address):
            assert_value(load_pickled(f"{place}/x.ckpt"))
            with pytest.raises(CheckpointError):
                load_pickled(f"{place}/evil.ckpt")
            assert not touch.exists(), place
            with pytest.raises(CheckpointError, match=r"Checkpoint file not found: .*/none\.ckpt"):
                load_pickled(f"{place}/none.ckpt")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_refusal_names_the_object_and_the_remedy(tmp_path):
    torch.save({"a": [evil(tmp_path / "touched")]}, tmp_path / "x.ckpt")
    message = rf"x\.ckpt holds Python objects \(posix\.system\) .*{TYPE_THIS}"
    with pytest.raises(CheckpointError, match=message):
        load_pickled(tmp_path / "x.ckpt")
    with serving(tmp_path) as address, pytest.raises(CheckpointError, match=message):
        load_pickled(f"{address}/x.ckpt")
    torch.save({"a": Call(getattr, "x", "upper")}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=rf"\(getattr\) .*{TYPE_THIS}"):
        load_pickled(tmp_path / "x.ckpt")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(("value", "name"), [
    (argparse.Namespace(a=1), "argparse.Namespace"),
    (pathlib.PurePosixPath("a"), "pathlib.PurePosixPath"),
    (np.arange(3), "numpy"),
    (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
])  # fmt: skip
def test_harmless_objects_need_trust(tmp_path, value, name):
    torch.save({"a": value}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=rf"{name}.*{TYPE_THIS}"):
        load_pickled(tmp_path / "x.ckpt")
    assert type(load_pickled(tmp_path / "x.ckpt", trust=True)["a"]) is type(value)


def test_trust_lets_code_run(tmp_path):
    torch.save({"a": evil(tmp_path / "touched")}, tmp_path / "x.ckpt")
    load_pickled(tmp_path / "x.ckpt", trust=True)
    assert (tmp_path / "touched").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_plain_values_in_a_newer_pickle(tmp_path):
    """Torch's safe reader knows protocol 2 alone; nothing else is tried in its place."""
    torch.save(value(), tmp_path / "x.ckpt", pickle_protocol=4)
    with pytest.raises(CheckpointError, match=rf"has a pickle protocol that .*{TYPE_THIS}.*pickle_protocol=2"):
        load_pickled(tmp_path / "x.ckpt")
    assert_value(load_pickled(tmp_path / "x.ckpt", trust=True))


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
def test_truncated_files_that_are_trusted(tmp_path, is_zip):
    data = saved_bytes(value(), _use_new_zipfile_serialization=is_zip)
    for length in (0, 1, 3, 4, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "x.ckpt").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"x\.ckpt .*(is empty|damaged).*Use another checkpoint"):
            load_pickled(tmp_path / "x.ckpt", trust=True)


def test_other_values_are_refused(tmp_path):
    torch.save([1, 2], tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"holds a builtins\.list, not a checkpoint"):
        load_pickled(tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="nowhere://a/b cannot be opened"):
        load_pickled("nowhere://a/b")


def test_no_permission(tmp_path, monkeypatch):
    torch.save(value(), tmp_path / "x.ckpt")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(CheckpointError, match=r"x\.ckpt cannot be opened: PermissionError"):
        load_pickled(tmp_path / "x.ckpt")


def dcp_folder(path: Any) -> None:
    state = {"state_dict": {"w": torch.arange(6.0).reshape(2, 3)}, "epoch": 3, "list": [1, {"x": torch.ones(2)}]}
    dcp.save(state, checkpoint_id=path, no_dist=True)


def test_folders_of_dcp_need_trust(tmp_path):
    dcp_folder(tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=rf"\.metadata is a pickle, .*{TYPE_THIS}"):
        load_pickled(tmp_path / "dcp")
    found = load_pickled(tmp_path / "dcp", trust=True)
    assert torch.equal(found["state_dict"]["w"], torch.arange(6.0).reshape(2, 3))
    assert found["epoch"] == 3
    assert found["list"][0] == 1
    assert found["list"][1]["x"].tolist() == [1, 1]
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="dcp could not be loaded"):
        load_pickled(tmp_path / "dcp", trust=True)


def test_metadata_of_dcp_does_not_run(tmp_path):
    dcp_folder(tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickles(tmp_path / "touched")["os.system, protocol 4"])
    with pytest.raises(CheckpointError):
        load_pickled(tmp_path / "dcp")
    assert not (tmp_path / "touched").exists()
    with pytest.raises(CheckpointError, match="could not be loaded"):
        load_pickled(tmp_path / "dcp", trust=True)
    assert (tmp_path / "touched").exists()


def test_folders_of_lightning_fsdp(tmp_path):
    """Weights and optimizers through DCP, the rest beside them in a file."""
    state = {"model": {"w": torch.ones(3)}, "optimizer_0": {"state": {"w": {"exp_avg": torch.zeros(3)}}}}
    dcp.save(state, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    torch.save({"epoch": 4, "loops": {}}, tmp_path / "fsdp" / "meta.pt")
    found = load_pickled(tmp_path / "fsdp", trust=True)
    assert found["epoch"] == 4
    assert found["state_dict"]["w"].tolist() == [1, 1, 1]
    assert found["optimizer_states"][0]["state"]["w"]["exp_avg"].tolist() == [0, 0, 0]


def test_other_folders(tmp_path):
    with pytest.raises(CheckpointError, match=r"folder without a manifest\.json: not a checkpoint, or an incomplete"):
        load_pickled(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is a run state"):
        load_pickled(tmp_path)
