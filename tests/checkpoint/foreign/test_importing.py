"""Import of other tools' files into checkpoints that a run resumes from."""

import json
import os
import pickle
from collections import OrderedDict
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.foreign.deepspeed_files import make_trained, write_deepspeed
from tests.checkpoint.saved import (
    LanguageModule,
    Losses,
    loader,
    logits,
    model,
    one_at_a_time,
    resumed_by_lightning,
    save,
    saved_by_lightning,
)
from tests.parity.harness import make_trainer
from trainwright.checkpoint.foreign.export import export
from trainwright.checkpoint.foreign.importing import import_checkpoint
from trainwright.checkpoint.foreign.safetensors_folder import SafetensorsFolder
from trainwright.checkpoint.read.run_state import RunState, materialised
from trainwright.core.errors import CheckpointError
from trainwright.strategies.contract.registry import make_strategy
from trainwright.strategies.state.wholes import gather_tree


def weights_of(path):
    return materialised(RunState.open(str(path)).tree["state_dict"])


def equal(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_safetensors_and_back(tmp_path):
    tensors = {f"w{index}": torch.randn(7, 5).to(dtype) for index, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(2.0), "empty": torch.zeros(0, 3)}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", {"format": "pt"})
    path = import_checkpoint(str(tmp_path / "m.safetensors"), tmp_path / "run.ckpt")
    assert path == tmp_path / "run.ckpt"
    assert RunState.open(str(path)).about["kind"] == "weights"
    again = safetensors.torch.load_file(export(str(path), tmp_path / "again.safetensors", "safetensors"))
    for found in (weights_of(path), again):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(bits(found[name]), bits(value)) for name, value in tensors.items())


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def test_torchtitan_dcp_folder(tmp_path):
    """As torchtitan saves: the names of the model at the top level, the rest in mappings beside them."""
    weights = {"layers.0.wq.weight": torch.randn(3, 4), "norm.weight": torch.randn(4)}
    moments = {f"state.{name}.exp_avg": torch.zeros_like(value) for name, value in weights.items()}
    dcp.save({**weights, "optimizer": moments, "train_state": {"step": 5}}, checkpoint_id=tmp_path / "step-5")
    with pytest.raises(CheckpointError, match="pickle"):
        import_checkpoint(str(tmp_path / "step-5"), tmp_path / "run.ckpt")
    with pytest.warns(UserWarning, match="skipped: optimizer, train_state"):
        path = import_checkpoint(str(tmp_path / "step-5"), tmp_path / "run.ckpt", trust=True)
    assert equal(weights_of(path), weights)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn)


def test_hugging_face_round_trip(tmp_path):
    import transformers

    network = model("llama", tied=True)
    network.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    path = import_checkpoint(str(tmp_path / "theirs"), tmp_path / "run.ckpt")
    again = transformers.AutoModelForCausalLM.from_pretrained(export(str(path), tmp_path / "ours", "hf"))
    assert torch.equal(logits(again), logits(network))
    theirs, ours = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours"))
    assert ours == theirs


@pytest.mark.parametrize("key", [None, "state_dict", "model", "model_state_dict"])
def test_torch_files(tmp_path, recwarn, key):
    tensors = OrderedDict(a=torch.randn(3, 4), b=torch.arange(5))
    tensors["tied"] = tensors["a"]
    torch.save(tensors if key is None else {key: tensors, "optimizer": {"state": {}}, "step": 3}, tmp_path / "m.pt")
    path = import_checkpoint(str(tmp_path / "m.pt"), tmp_path / "run.ckpt")
    assert equal(weights_of(path), dict(tensors))
    assert len(RunState.open(str(path)).keys()) == 2  # tied weights are stored once
    messages = [str(each.message) for each in recwarn if "imported" in str(each.message)]
    skipped = f"From {tmp_path}/m.pt the weights under {key!r} are imported; skipped: optimizer, step."
    assert messages == ([] if key is None else [skipped])


def test_tensors_are_imported_one_at_a_time(tmp_path):
    safetensors.torch.save_file({f"w{i}": torch.randn(50) for i in range(20)}, tmp_path / "m.safetensors")
    with one_at_a_time(SafetensorsFolder):
        import_checkpoint(str(tmp_path / "m.safetensors"), tmp_path / "run.ckpt")


@pytest.fixture(scope="module")
def lightning(tmp_path_factory):
    """A file of Lightning's own Trainer after three steps, and the imported checkpoint."""
    folder = tmp_path_factory.mktemp("lightning")
    theirs = saved_by_lightning(folder / "theirs.ckpt")
    return theirs, str(import_checkpoint(theirs, folder / "run.ckpt"))


def test_lightning_run_resumes(lightning):
    theirs, path = lightning
    assert RunState.open(path).about["step"] == 3
    losses = resumed_by_lightning(theirs)
    assert len(losses) == 3
    assert resumed_by_lightning(path, None, strategy=make_strategy("single")) == losses


def continue_from(path, strategy):
    losses = Losses()
    trainer = make_trainer(strategy, max_steps=6, max_epochs=-1, callbacks=[losses])
    trainer.fit(LanguageModule(), loader(), ckpt_path=path)
    state = {}
    for optimizer in trainer.optimizers:
        state[type(optimizer).__name__] = [int(values["step"]) for values in optimizer.state.values()]
    return losses.values, state


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_optimizer_states_by_position_under_other_layouts(ranks, lightning, strategy):
    for losses, steps in ranks(continue_from, 2, lightning[1], strategy):
        assert len(losses) == 3
        assert set(next(iter(steps.values()))) == {6}


def test_lightning_file_round_trips(tmp_path):
    save(str(tmp_path / "run.ckpt"))
    file = export(str(tmp_path / "run.ckpt"), tmp_path / "l.ckpt", "lightning")
    path = import_checkpoint(str(file), tmp_path / "again.ckpt")
    before, after = (RunState.open(str(p)).tree for p in (tmp_path / "run.ckpt", path))
    for key in before.keys() - {"trainwright", "optimizer_states", "state_dict"}:
        assert after[key] == before[key], key  # the position in the data as well
    assert equal(materialised(after["state_dict"]), materialised(before["state_dict"]))
    again = export(str(path), tmp_path / "l2.ckpt", "lightning")
    one, other = (torch.load(f, weights_only=True)["optimizer_states"] for f in (file, again))
    assert str(one) == str(other)


def test_unsupported_hyper_parameters_are_skipped(tmp_path):
    checkpoint = {
        "pytorch-lightning_version": pl.__version__,
        "state_dict": {"a": torch.ones(2)},
        "hyper_parameters": {"width": 3, "loss": torch.nn.MSELoss()},
    }
    torch.save(checkpoint, tmp_path / "l.ckpt")
    with pytest.warns(UserWarning, match=r"loss \(MSELoss\) are skipped"):
        path = import_checkpoint(str(tmp_path / "l.ckpt"), tmp_path / "run.ckpt", trust=True)
    assert RunState.open(str(path)).tree["hyper_parameters"] == {"width": 3}


class Trained(pl.LightningModule):
    """A module of the parameters of a DeepSpeed checkpoint, with a loss that has no gradient but zero."""

    def __init__(self, trained):
        super().__init__()
        self.groups = [list(group) for group in trained.groups]
        for name, value in trained.everything().items():
            *path, last = name.split(".")
            place = self
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, torch.nn.Module())
                place = getattr(place, part)
            if name in trained.buffers:
                place.register_buffer(last, torch.zeros_like(value))
            else:
                place.register_parameter(last, torch.nn.Parameter(torch.zeros_like(value), name not in trained.frozen))
        self.tail.weight = self.emb.weight

    def training_step(self, batch, index):
        return sum((p * 0).sum() for p in self.parameters() if p.requires_grad)

    def configure_optimizers(self):
        parameters = dict(self.named_parameters())
        return torch.optim.AdamW([{"params": [parameters[name] for name in names]} for names in self.groups], lr=0.1)


def make_tied():
    """The tied name stands last, as in a module that was made in this order."""
    return replace(make_trained(), shared={"tail.weight": "emb.weight"})


def step_from_deepspeed(path, strategy):
    """Return weights before and optimizer states after one step of a resumed run, whole and by name."""
    module = Trained(make_tied())
    before = {}

    class Watch(pl.Callback):
        def on_train_start(self, trainer, module):
            before.update(trainer.strategy.whole_parameters())

    trainer = make_trainer(strategy, max_steps=1, max_epochs=-1, callbacks=[Watch()])
    trainer.fit(module, loader(), ckpt_path=path)
    names = [name for group in module.groups for name in group]
    (optimizer,) = trainer.optimizers
    states = gather_tree(optimizer.state_dict()["state"], keep=True)
    return before, {names[position]: values for position, values in states.items()}, dict(module.named_buffers())


@pytest.mark.parametrize(("stage", "strategy"), [(2, "ddp"), (3, "zero3")])
def test_deepspeed_run_resumes(ranks, tmp_path, stage, strategy):
    trained = make_tied()
    write_deepspeed(tmp_path / "theirs", trained, stage=stage, ranks=3)
    scheduler = pytest.warns(UserWarning, match=r"scheduler of DeepSpeed \(last_batch_iteration\)")
    with scheduler, pytest.warns(UserWarning, match="not saved by Lightning"):
        path = import_checkpoint(str(tmp_path / "theirs"), tmp_path / "run.ckpt")
    assert equal(weights_of(path), trained.everything())
    about = RunState.open(str(path)).about
    assert (about["kind"], about["step"], about["strategy"]) == ("run state", 5, f"deepspeed_stage_{stage}")
    before, states, buffers = ranks(step_from_deepspeed, 2, str(path), strategy)[0]
    for name, value in before.items():
        assert torch.equal(value, trained.everything()[name]), name
    for name, value in buffers.items():
        assert torch.equal(value, trained.buffers[name]), name
    for name, moments in trained.moments.items():  # a gradient of zero only shrinks them
        assert states[name]["step"] == 6
        torch.testing.assert_close(states[name]["exp_avg"], 0.9 * moments["exp_avg"])
        torch.testing.assert_close(states[name]["exp_avg_sq"], 0.999 * moments["exp_avg_sq"])


def begin_from(source, strategy, options):
    """Return the initial weights of a run with ``init_from=source``."""
    trainer = make_trainer(strategy, {**options, "init_from": source}, limit_val_batches=1)
    module = LanguageModule()
    module.strict_loading = False  # the temperature is not in the source
    trainer.validate(module, loader(), verbose=False)
    return dict(trainer.strategy.whole_parameters())


@pytest.mark.parametrize(("strategy", "options"), [("ddp", {}), ("zero3", {}), ("hybrid", {"tensor": 2, "shard": 1})])
def test_init_from_hugging_face_under_every_layout(ranks, tmp_path, strategy, options):
    """Names without the module's prefix, tied weights written once, each rank its part."""
    network = model()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.5)
    network.save_pretrained(tmp_path / "hf")
    path = import_checkpoint(str(tmp_path / "hf"), tmp_path / "run.ckpt")
    for source in (tmp_path / "hf", path):
        found = ranks(begin_from, 2, str(source), strategy, options)[0]
        for name, value in network.named_parameters():
            assert torch.equal(found[f"model.{name}"], value), name


def test_overwriting_and_stores(tmp_path):
    torch.save({"a": torch.arange(3)}, tmp_path / "m.pt")
    for target in (tmp_path / "run.ckpt", "memory://imports/run.ckpt"):
        assert import_checkpoint(str(tmp_path / "m.pt"), target) == target
        with pytest.raises(CheckpointError, match="already exists.*--overwrite"):
            import_checkpoint(str(tmp_path / "m.pt"), target)
        import_checkpoint(str(tmp_path / "m.pt"), target, overwrite=True)
        assert torch.equal(weights_of(target)["a"], torch.arange(3))


@pytest.mark.parametrize(("source", "message"), [
    ("https://host/m.safetensors", "download it first"),
    ("nothing", "does not exist. Give a .safetensors file"),
    ("empty", "folder without a manifest.json"),
    ("bins", r"folder with pytorch_model\.bin; give one of these files"),
    ("run.ckpt", "already a checkpoint of Trainwright"),
    ("numbers.pt", "no recognized weights"),
    ("list.pt", "not a"),
    ("cut.pt", r"cut\.pt"),
])  # fmt: skip
def test_unsupported_sources(tmp_path, source, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bins").mkdir()
    (tmp_path / "bins" / "pytorch_model.bin").write_bytes(pickle.dumps(1))
    torch.save({"a": torch.ones(1)}, tmp_path / "m.pt")
    import_checkpoint(str(tmp_path / "m.pt"), tmp_path / "run.ckpt")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "m.pt").read_bytes()[:200])
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(source if "://" in source else str(tmp_path / source), tmp_path / "new.ckpt")
    assert not (tmp_path / "new.ckpt").exists()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
