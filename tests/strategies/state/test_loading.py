"""Lightning's ``load_from_checkpoint`` and run states."""

import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.io import torch_io
from lightning.pytorch.core import saving

from tests.checkpoint.saved import LanguageModule, save
from trainwright.checkpoint.read.run_state import StoredTensor
from trainwright.core.errors import CheckpointError, DamagedCheckpoint
from trainwright.strategies.base.strategy import LayoutStrategy  # noqa: F401 - importing it is what teaches Lightning
from trainwright.strategies.state.loading import load_whole, patch_lightning


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A run state of two ranks, and the weights in it."""
    path = str(tmp_path_factory.mktemp("saved") / "run.ckpt")
    return path, pool.run(partial_save, 2, path)[0]


def partial_save(path):
    return save(path, "zero3", {"one_file": False}, tied=True, learning_rate=0.02)


def test_whole_modules_from_a_run_state(saved):
    path, weights = saved
    module = LanguageModule.load_from_checkpoint(path)
    assert module.hparams.learning_rate == 0.02
    assert module.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight
    changed = LanguageModule.load_from_checkpoint(Path(path), learning_rate=0.5, weights_only=True)
    assert changed.hparams.learning_rate == 0.5


def to_meta(storage, where):
    return torch.UntypedStorage(storage.nbytes(), device="meta") if where == "cpu" else None


@pytest.mark.parametrize("map_location", ["meta", torch.device("meta"), {"cpu": "meta"}, to_meta])
def test_map_location(saved, map_location):
    found = load_whole(saved[0], map_location)
    assert {value.device.type for value in found["state_dict"].values()} == {"meta"}
    assert {value.device.type for value in load_whole(saved[0])["state_dict"].values()} == {"cpu"}


def test_tied_weights_and_unread_optimizer_states(saved):
    found = load_whole(saved[0])
    state = found["state_dict"]
    assert state["model.lm_head.weight"] is state["model.model.embed_tokens.weight"]
    values = found["optimizer_states"][0]["state"]["model.model.norm.weight"]
    assert isinstance(values["exp_avg"], StoredTensor)


def test_load_hooks_get_the_checkpoint(saved):
    class Watching(LanguageModule):
        def on_load_checkpoint(self, checkpoint):
            self.seen = checkpoint["global_step"], checkpoint["state_dict"]["temperature"]

    step, temperature = Watching.load_from_checkpoint(saved[0]).seen
    assert step == 3
    assert torch.equal(temperature, saved[1]["temperature"])


def test_refuses_a_damaged_run_state(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "run.ckpt")
    (tmp_path / "run.ckpt" / "rank_00001.safetensors").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match=r"rank_00001\.safetensors"):
        LanguageModule.load_from_checkpoint(tmp_path / "run.ckpt")


def test_refuses_an_incomplete_folder(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"folder without a manifest.*state\.json"):
        LanguageModule.load_from_checkpoint(tmp_path)


def test_lightning_reads_ordinary_files(tmp_path):
    module = LanguageModule()
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "theirs.ckpt", weights_only=True)
    again = LanguageModule.load_from_checkpoint(tmp_path / "theirs.ckpt")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in module.state_dict().items())
    taught = saving.pl_load, torch_io.pl_load
    assert all(hasattr(function, "without_run_states") for function in taught)
    patch_lightning()
    assert (saving.pl_load, torch_io.pl_load) == taught
    with (tmp_path / "theirs.ckpt").open("rb") as file:
        LanguageModule.load_from_checkpoint(file)


class Payload:
    def __reduce__(self):
        return os.system, ("touch ran",)


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path) -> Iterator[str]:
    """Address of a folder with one file that runs code."""
    (tmp_path / "served").mkdir()
    torch.save({"state_dict": {}, "x": Payload()}, tmp_path / "served" / "evil.ckpt")
    handler = partial(Silent, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/evil.ckpt"
        server.shutdown()
        thread.join()


@pytest.fixture
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("load", [saving.pl_load, torch_io.pl_load, LanguageModule.load_from_checkpoint])
def test_downloads_execute_no_code(server, load):
    with pytest.raises(Exception, match="(?i)weights.only"):
        load(server)
    assert not os.path.exists("ran")


@pytest.mark.usefixtures("_own_cache")
def test_downloads_execute_code_if_trusted(server):
    saving.pl_load(server, weights_only=False)
    assert os.path.exists("ran")
