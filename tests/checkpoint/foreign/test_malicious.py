"""Crafted checkpoints through every entry point: no code in them runs."""

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.checkpoint.foreign.deepspeed_files import deepspeed_modules, make_trained, write_deepspeed
from tests.checkpoint.payload import Call, evil, forget_extension, old_torch_files, pickles, torch_file
from tests.checkpoint.store.server import serving
from tests.parity.harness import make_trainer
from trainwright.checkpoint.foreign.export import export
from trainwright.checkpoint.foreign.importing import import_checkpoint
from trainwright.checkpoint.format.manifest import read_manifest
from trainwright.checkpoint.read.run_state import RunState
from trainwright.checkpoint.store.storage import remove
from trainwright.core.errors import CheckpointError
from trainwright.tools.checkpoints.command import run_checkpoint_command

FORMATS = ("safetensors", "hf", "lightning", "torch")


class Net(pl.LightningModule):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)

    test_step = validation_step
    predict_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    """A data module with its own ``load_from_checkpoint``."""


def loader() -> DataLoader[Any]:
    return DataLoader(torch.ones(4, 2), batch_size=2)


def trainer(init_from: str | None = None, **options: Any) -> Any:
    return make_trainer("single", {"init_from": init_from}, max_steps=1, max_epochs=-1, **options)


def command(*words: str) -> None:
    """Run a verb of the command line, which must fail."""
    if run_checkpoint_command(["checkpoint", *words]) != 0:
        raise CheckpointError("the command refused")


# Every entry point of checkpoints. Errors are fine, as long as no code runs.
DOORS: dict[str, Callable[[str], Any]] = {
    "fit": lambda path: trainer().fit(Net(), loader(), ckpt_path=path),
    "validate": lambda path: trainer().validate(Net(), loader(), ckpt_path=path, verbose=False),
    "test": lambda path: trainer().test(Net(), loader(), ckpt_path=path, verbose=False),
    "predict": lambda path: trainer().predict(Net(), loader(), ckpt_path=path),
    "init_from": lambda path: trainer(init_from=path).fit(Net(), loader()),
    "plugin": lambda path: trainer(plugins=[TorchCheckpointIO()]).fit(Net(), loader(), ckpt_path=path),
    "data": lambda path: Data.load_from_checkpoint(path),
    "load_from_checkpoint": lambda path: Net.load_from_checkpoint(path),
    "import": lambda path: import_checkpoint(path, "imported"),
    **{f"export {kind}": lambda path, kind=kind: export(path, f"exported-{kind}", kind) for kind in FORMATS},
    "open": lambda path: (RunState.open(path).tree, RunState.open(path).keys()),
    "verify": lambda path: command("verify", path),
    "inspect": lambda path: command("inspect", path, "--all", "--json"),
    "list": lambda path: command("list", os.path.dirname(path), "--deep"),
    "command import": lambda path: command("import", path, "--to", "imported-2"),
    "command export": lambda path: command("export", path, "--format", "torch", "--to", "exported.pt"),
}
WEB_DOORS = ["fit", "validate", "plugin", "data", "load_from_checkpoint", "import", "init_from", "command import"]
# Looks for checkpoints in a folder; that there is none may be an error or not.
LENIENT = {"list"}


@pytest.fixture
def touch(tmp_path, monkeypatch):
    # Download cache of torch.
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch_home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path / "touched"
    forget_extension()


def lightning_file(**entries: Any) -> dict[str, Any]:
    """Return a loadable checkpoint of Lightning."""
    empty = {"loops": {}, "callbacks": {}, "optimizer_states": [], "lr_schedulers": []}
    about = {"epoch": 0, "global_step": 0, "pytorch-lightning_version": "2.6.0"}
    return {**about, "state_dict": Net().state_dict(), **empty, **entries}


def evil_files(folder: Path, touch: Path) -> dict[str, Path]:
    """Write files that run code when unpickled."""
    payloads = pickles(touch)
    old = old_torch_files(payloads["os.system, protocol 2"])
    contents = {
        "alone": torch_file(payloads["os.system, protocol 2"]),
        "newer": torch_file(payloads["getattr, protocol 4"]),
        "setstate": torch_file(payloads["__setstate__ as state"]),
        "old": old["object"],
        "first": old["magic number"],
        "pickle": payloads["os.system, protocol 2"],
    }
    for name, data in contents.items():
        (folder / f"{name}.ckpt").write_bytes(data)
        (folder / f"{name}.safetensors").write_bytes(data)
    torch.save(lightning_file(callbacks={"x": evil(touch)}), folder / "inside.ckpt")
    torch.save(lightning_file(hyper_parameters={"width": evil(touch)}), folder / "hparams.ckpt")
    return {path.name: path for path in sorted(folder.glob("*.*"))}


def try_door(door: str, path: str | Path, touch: Path) -> Exception | None:
    """Use an entry point and return its error, if any."""
    error = None
    try:
        DOORS[door](str(path))
    except Exception as raised:
        error = raised
    assert not touch.exists(), f"code of {path} ran through {door}"
    return error


@pytest.mark.sample(10)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("door", DOORS)
def test_files(tmp_path, touch, door):
    (tmp_path / "files").mkdir()
    for path in evil_files(tmp_path / "files", touch).values():
        error = try_door(door, path, touch)
        assert error is not None or door in LENIENT, f"{path.name} went through"
    assert list((tmp_path / "work").glob("imported*")) == []


def test_these_files_would_run_code(tmp_path, touch):
    """Checks the test above."""
    (tmp_path / "files").mkdir()
    for name, path in evil_files(tmp_path / "files", touch).items():
        if not name.endswith(".ckpt"):
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *args, **kwargs: None)
            try_loading(path, pickle.loads if name.startswith("pickle") else None)
        assert touch.exists(), name
        touch.unlink()


def try_loading(path: Path, load: Callable[[bytes], Any] | None) -> None:
    try:
        load(path.read_bytes()) if load else torch.load(path, weights_only=False)
    except Exception:
        return


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("door", WEB_DOORS)
def test_files_of_a_web_server(tmp_path, touch, door):
    (tmp_path / "files").mkdir()
    names = evil_files(tmp_path / "files", touch)
    with serving(tmp_path / "files") as address:
        for name in names:
            assert try_door(door, f"{address}/{name}", touch) is not None, f"{name} went through"


@pytest.mark.parametrize("door", DOORS)
def test_folders_of_dcp(tmp_path, touch, door):
    folder = tmp_path / "dcp"
    dcp.save({"state_dict": {"layer.weight": torch.ones(1, 2)}}, checkpoint_id=folder, no_dist=True)
    (folder / ".metadata").write_bytes(pickles(touch)["os.system, protocol 4"])
    torch.save({"epoch": evil(touch)}, folder / "meta.pt")
    assert try_door(door, folder, touch) is not None or door in LENIENT


@pytest.mark.parametrize(("door", "function"), [
    *((door, "exec") for door in DOORS), ("import", "os.system"), ("command import", "os.system"),
])  # fmt: skip
def test_folders_of_deepspeed(tmp_path, touch, door, function):
    """Objects are skipped where possible; files that torch's safe reader refuses are refused."""
    folder = tmp_path / "deepspeed"
    bad = evil(touch) if function == "os.system" else Call(exec, f"open({str(touch)!r}, 'w').close()")
    step = write_deepspeed(folder, make_trained(), stage=2, ranks=2, client={"epoch": 3, "ours": [bad]})
    path = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with deepspeed_modules():
        state = torch.load(path, weights_only=False)
        torch.save({**state, "more": bad}, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        error = try_door(door, folder, touch)
    read = function == "exec" and door in ("import", "command import")
    assert door in LENIENT or (error is None) == read, error


def forge(folder: Path, files: Mapping[str, bytes], about: Mapping[str, Any] | None = None) -> Path:
    """Write a run state with a valid manifest of arbitrary files."""
    folder.mkdir(parents=True)
    records = {}
    for name, data in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        records[name] = {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data), "rank": 0}
    (folder / "manifest.json").write_bytes(manifest(records, about or {"kind": "run state", "step": 1}))
    return folder


def manifest(records: Mapping[str, Any], about: Mapping[str, Any]) -> bytes:
    content: dict[str, Any] = {"about": about, "files": records, "version": 1}
    content["xxh3_128"] = xxhash.xxh3_128_hexdigest(canonical(content))
    return canonical(content)


def canonical(content: Any) -> bytes:
    return (json.dumps(content, sort_keys=True, indent=1) + "\n").encode()


def good_files(path: Path) -> dict[str, bytes]:
    """Write a loadable run state and return its files without the manifest."""
    saving = trainer()
    saving.strategy.options.one_file = False
    saving.fit(Net(), loader())
    saving.save_checkpoint(path)
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "manifest.json"}


@pytest.fixture(scope="module")
def good(tmp_path_factory: Any) -> dict[str, bytes]:
    return good_files(tmp_path_factory.mktemp("good") / "good.ckpt")


def changed(data: bytes, **entries: Any) -> bytes:
    return json.dumps({**json.loads(data), **entries}).encode()


def forgeries(folder: Path, touch: Path, good: dict[str, bytes]) -> dict[str, Path]:
    """Write forged run states, which must not load."""
    run = f"open({str(touch)!r}, 'w').close()"
    payloads = pickles(touch)
    calls = [
        {"~": "class", "v": "os.system"},
        {"~": "reduce", "v": ["os.system", [f"touch {touch}"]]},
        {"~": "builtins.exec", "v": run},
        {"~": "dtype", "v": "load"},
        {"~": "object", "v": {"_target_": "os.system", "command": f"touch {touch}"}},
    ]
    trees = {f"tree {i}": {"state.json": changed(good["state.json"], callbacks={"x": c})} for i, c in enumerate(calls)}
    boxes = json.loads(good["tensors.json"])["tensors"]
    for entry in boxes.values():
        for box in entry["boxes"]:
            box[2] = "../outside.safetensors"
    contents = {
        **trees,
        "tensors elsewhere": {"tensors.json": changed(good["tensors.json"], tensors=boxes)},
        "state is a pickle": {"state.json": payloads["os.system, protocol 2"]},
        "tensors are a pickle": {"tensors.json": payloads["os.system, protocol 0"]},
        "weights are a pickle": {"rank_00000.safetensors": payloads["os.system, protocol 2"]},
        "weights are a torch file": {"rank_00000.safetensors": torch_file(payloads["os.system, protocol 2"])},
    }
    (folder / "outside.safetensors").write_bytes(good["rank_00000.safetensors"])
    found = {name: forge(folder / f"{name}.ckpt", {**good, **files}) for name, files in contents.items()}
    for number, name in enumerate(["../outside.safetensors", "/etc/hostname", "a/../../outside.safetensors"]):
        path = forge(folder / f"named {number}.ckpt", good)
        records = json.loads((path / "manifest.json").read_bytes())["files"]
        records[name] = records["rank_00000.safetensors"]
        (path / "manifest.json").write_bytes(manifest(records, {"kind": "run state", "step": 1}))
        found[path.name] = path
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("door", DOORS)
def test_forged_run_states(tmp_path, touch, good, door):
    for name, path in forgeries(tmp_path, touch, good).items():
        error = try_door(door, path, touch)
        # What a door does not read may go through: only some read tensors, others not all of the state.
        reads_all = door in ("fit", "validate", "load_from_checkpoint", "export lightning")
        if reads_all or name.startswith("named") or (door == "open" and "weights" not in name):
            assert isinstance(error, CheckpointError) or door in LENIENT, f"{name} went through"


def test_hyper_parameters_name_no_function(tmp_path, touch, good):
    """Lightning calls ``_instantiator`` if it is on an allowlist."""
    for name in ("os.system", "builtins.exec", "torch.load"):
        parameters = {"_instantiator": name, "width": 2, "_class_path": "os.system"}
        state = changed(good["state.json"], hyper_parameters=parameters)
        path = forge(tmp_path / f"{name}.ckpt", {**good, "state.json": state})
        with pytest.raises(ValueError, match="not in the allowlist"):
            Net.load_from_checkpoint(str(path))


@pytest.mark.parametrize("door", DOORS)
def test_other_files_of_a_run_are_not_loaded(tmp_path, touch, good, door):
    folder = tmp_path / "run" / "checkpoints"
    path = forge(folder / "step=1", good)
    payload = pickles(touch)["os.system, protocol 2"]
    for name in (".metadata", "meta.pt", "mp_rank_00_model_states.pt", "data.pkl", "pytorch_model.bin", "__init__.py"):
        (path / name).write_bytes(f"open({str(touch)!r}, 'w')".encode() if name.endswith(".py") else payload)
    target = f"_target_: os.system\ncommand: touch {touch}\nx: !!python/object/apply:os.system ['touch {touch}']\n"
    for place in (path, folder, folder.parent, folder.parent / ".hydra"):
        place.mkdir(exist_ok=True)
        (place / "config.yaml").write_text(target)
        (place / "hparams.yaml").write_text(target)
    error = try_door(door, path, touch)
    # These want a folder of another kind, a file, or a Hugging Face model.
    assert (error is None) == (door not in ("import", "command import", "export hf")), error
    if door == "list":
        assert try_door(door, folder, touch) is None  # the run directory


def test_links_are_neither_read_nor_removed(tmp_path, touch, good):
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(b"not a tensor")
    path = forge(tmp_path / "linked.ckpt", good)
    (path / "rank_00000.safetensors").unlink()
    (path / "rank_00000.safetensors").symlink_to(secret)
    for door in ("fit", "load_from_checkpoint", "open"):
        error = try_door(door, path, touch)
        assert isinstance(error, CheckpointError)
        assert "rank_00000.safetensors" in str(error)
    remove(str(path))
    assert not path.exists()
    assert secret.read_bytes() == b"not a tensor"


def test_forging_itself_is_harmless(tmp_path, touch, good):
    path = forge(tmp_path / "again.ckpt", good)
    assert read_manifest(str(path)).step == 1
    assert try_door("fit", path, touch) is None
    assert try_door("load_from_checkpoint", path, touch) is None
    os.remove(path / "manifest.json")
    assert isinstance(try_door("fit", path, touch), CheckpointError)
