"""Checkpoints by ModelCheckpoint, Trainer(ckpt_path=...), save_checkpoint and load_from_checkpoint."""

from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.parity.harness import QUIET, make_trainer
from trainwright.checkpoint.read.run_state import RunState, StoredTensor
from trainwright.checkpoint.store.storage import Folder
from trainwright.core.errors import CheckpointError
from trainwright.strategies.data.single import SingleDeviceStrategy

WIDTH = 8
TENSOR = {"tensor": 2, "shard": 1, "plan": {"tensor": {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}}}
TWO = [("ddp", {}), ("zero1", {}), ("zero3", {}), ("hybrid", TENSOR)]


class Net(pl.LightningModule):
    """Module with dropout, a running statistic, a tied weight, a scalar and a frozen parameter."""

    def __init__(self, hidden: int = 16, dropout: float = 0.5, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(WIDTH, hidden, bias=False)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(hidden, 20), nn.ReLU(), nn.Linear(20, hidden), nn.Dropout(dropout))
                for _ in range(2)
            ]
        )
        self.norm = nn.BatchNorm1d(hidden)
        self.tied = nn.Linear(WIDTH, hidden, bias=False)
        self.tied.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.norm(hidden) * self.scale + self.tied(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1)), batch_size=batch_size)


def trainer_of(strategy: str = "single", options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    return make_trainer(strategy, options, **{"max_steps": 2, "max_epochs": -1, **kwargs})


def saved(path: Path, module: pl.LightningModule | None = None, batch_size: int = 4, **kwargs: Any) -> Any:
    trainer = trainer_of(**kwargs)
    trainer.fit(module or Net(), data(batch_size))
    trainer.save_checkpoint(path)
    return trainer


def test_contents_of_a_checkpoint(tmp_path):
    trainer = saved(tmp_path / "x.ckpt")
    state = RunState.open(str(tmp_path / "x.ckpt"))
    module = trainer.lightning_module
    assert {"manifest.json", "state.json", "tensors.json", "data.pkl"} <= set(Folder(tmp_path / "x.ckpt").names())
    assert torch.load(tmp_path / "x.ckpt")["state_dict"].keys() == module.state_dict().keys()
    tree = state.tree
    assert list(tree["state_dict"]) == list(module.state_dict())
    for name, value in module.state_dict().items():
        assert torch.equal(tree["state_dict"][name].whole(), value), name
    # A tied weight is kept once.
    assert tree["state_dict"]["tied.weight"].key == tree["state_dict"]["embed.weight"].key == "weights/embed.weight"
    assert tree["optimizer_states"][0]["state"].keys() == {
        name for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    assert state.about["kind"] == "run state"
    assert (state.about["step"], state.about["strategy"], state.about["world_size"]) == (2, "single", 1)
    assert {"torch", "lightning", "trainwright", "python"} == state.about["versions"].keys()


def save_on_two(strategy: str, options: dict[str, Any], path: str) -> None:
    saved(Path(path), strategy=strategy, options=options)


@pytest.mark.parametrize(("strategy", "options"), [case for case in TWO if case[0] != "ddp"])
def test_ranks_share_the_writing(ranks, tmp_path, strategy, options):
    saved(tmp_path / "alone.ckpt")
    ranks(save_on_two, 2, strategy, {**options, "one_file": False}, str(tmp_path / "two.ckpt"))
    alone, two = (RunState.open(str(tmp_path / name)) for name in ("alone.ckpt", "two.ckpt"))
    shared = {key for key in alone.keys() if not key.startswith("rank/")}  # noqa: SIM118 - a source is no dict
    assert {key for key in two.keys() if not key.startswith("rank/")} == shared  # noqa: SIM118
    written: Counter[int] = Counter()
    for key in shared:
        assert two.shape(key) == alone.shape(key)
        for box in two.stored[key].boxes:
            written[two.manifest.files[box.file].rank] += box_bytes(two, key, box.sizes)
    total = sum(box_bytes(alone, key, alone.shape(key)) for key in shared)
    assert sum(written.values()) == total
    assert max(written.values()) < 0.62 * total


def box_bytes(state: RunState, key: str, sizes: tuple[int, ...]) -> int:
    return torch.Size(sizes).numel() * state.dtype(key).itemsize


def read_on_two(path: str) -> int:
    """Return the bytes of weights and optimizer state that this rank reads to resume under ZeRO-3."""
    count = 0
    read = RunState._read_box

    def counting(self: RunState, stored: Any, dtype: Any, offsets: Any, sizes: Any) -> Tensor:
        nonlocal count
        box = read(self, stored, dtype, offsets, sizes)
        count += 0 if stored.name.startswith("rank/") else box.numel() * box.element_size()
        return box

    RunState._read_box = counting  # type: ignore[method-assign]
    try:
        trainer_of("zero3", max_steps=3).fit(Net(), data(2), ckpt_path=path)
    finally:
        RunState._read_box = read  # type: ignore[method-assign]
    return count


def test_ranks_read_only_their_shards(ranks, tmp_path):
    saved(tmp_path / "x.ckpt")
    state = RunState.open(str(tmp_path / "x.ckpt"))
    total = sum(box_bytes(state, key, state.shape(key)) for key in state.stored if not key.startswith("rank/"))
    for count in ranks(read_on_two, 2, str(tmp_path / "x.ckpt")):
        assert count < 0.62 * total


def fit_and_resume(strategy: str, options: dict[str, Any], folder: str, step: int) -> tuple[Any, ...]:
    torch.manual_seed(5)
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=step, save_top_k=-1)
    whole = Net()
    trainer_of(strategy, options, max_steps=12, callbacks=[saver], enable_checkpointing=True).fit(whole, data())
    torch.manual_seed(6)
    again = Net()
    trainer_of(strategy, options, max_steps=12).fit(again, data(), ckpt_path=f"{folder}/step={step}.ckpt")
    buffers = [dict(module.named_buffers()) for module in (whole, again)]
    equal = all(torch.equal(buffers[0][name], buffers[1][name]) for name in buffers[0])
    return whole.losses[step:], again.losses, equal


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", [3, 8])  # mid-epoch, and at the end of an epoch
@pytest.mark.parametrize(("strategy", "options", "size"), [("single", {}, 1), *((*two, 2) for two in TWO)])
def test_random_numbers_resume_exactly(ranks, tmp_path, strategy, options, size, step):
    for expected, found, buffers in ranks(
        fit_and_resume, size, strategy, options, str(tmp_path), step, init_group=size > 1
    ):
        assert found == expected
        assert buffers


def numbers_after(strategy: str, path: str) -> list[float]:
    """Return the first random numbers of each rank after resuming."""
    trainer = trainer_of(strategy, max_steps=3)
    numbers: list[float] = []

    class RecordsDraws(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            numbers.append(torch.rand(()).item())

    trainer.fit(RecordsDraws(), data(2), ckpt_path=path)
    return numbers


def test_new_data_ranks_get_their_own_seeds(ranks, tmp_path):
    saved(tmp_path / "x.ckpt", batch_size=6)
    drawn = [numbers[0] for numbers in ranks(numbers_after, 3, "ddp", str(tmp_path / "x.ckpt"))]
    assert len(set(drawn)) == 3


def test_weights_only(tmp_path):
    trainer = trainer_of()
    trainer.fit(Net(), data())
    with pytest.raises(TypeError, match="storage_options"):
        trainer.save_checkpoint(tmp_path / "x.ckpt", storage_options={"a": 1})
    assert list(tmp_path.glob("*.ckpt")) == []
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    state = RunState.open(str(tmp_path / "x.ckpt"))
    assert state.about["kind"] == "weights"
    assert "optimizer_states" not in state.tree
    fresh = Net()
    (metrics,) = trainer_of().validate(fresh, data(), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    (expected,) = trainer_of().validate(trainer.lightning_module, data(), verbose=False)
    assert metrics == expected


def test_load_from_checkpoint(tmp_path):
    trainer = saved(tmp_path / "x.ckpt", Net(hidden=12, dropout=0.25))
    found = Net.load_from_checkpoint(tmp_path / "x.ckpt")
    assert (found.hparams.hidden, found.hparams.dropout) == (12, 0.25)
    for name, value in trainer.lightning_module.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def test_unserializable_hyper_parameters_are_skipped(tmp_path):
    with pytest.warns(UserWarning, match=r"extra \(Lock\)? ?.*left out|extra .*left out"):
        saved(tmp_path / "x.ckpt", Net(extra=torch.nn.functional.relu), options={"one_file": False})
    found = Net.load_from_checkpoint(tmp_path / "x.ckpt", extra=1)
    assert found.hparams.extra == 1


class EditsOnLoad(Net):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert not any(isinstance(value, StoredTensor) for value in checkpoint["state_dict"].values())
        checkpoint["state_dict"]["scale"] = checkpoint["state_dict"]["scale"] * 0 + 7


def test_on_load_checkpoint_may_edit_weights(tmp_path):
    saved(tmp_path / "x.ckpt")
    module = EditsOnLoad()
    trainer_of(max_steps=2).fit(module, data(), ckpt_path=tmp_path / "x.ckpt")
    assert module.scale.item() == 7


class Renames(Net):
    """Renames tensors of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state["scale"] = state.pop("scale") + 1


def test_load_state_dict_hooks_run(tmp_path):
    trainer = saved(tmp_path / "x.ckpt")
    module = Renames()
    trainer_of(max_steps=2).fit(module, data(), ckpt_path=tmp_path / "x.ckpt")
    assert module.scale.item() == pytest.approx(trainer.lightning_module.scale.item() + 1)


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.tail = nn.ModuleList([nn.Linear(2, 2) for _ in range(20)])


def test_refuses_a_different_model(tmp_path):
    saved(tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError) as error:
        trainer_of().fit(Other(), data(), ckpt_path=tmp_path / "x.ckpt")
    text = str(error.value)
    assert "40 tensor(s) missing: tail.0.weight" in text
    assert "and 32 more" in text
    assert "5 tensor(s) unexpected: norm.bias" in text
    assert "strict=false" in text
    with pytest.raises(CheckpointError, match=r"shape: embed.weight: saved \(16, 8\), the module has \(6, 8\)"):
        trainer_of().fit(Net(hidden=6), data(), ckpt_path=tmp_path / "x.ckpt")


def test_non_strict_loading(tmp_path):
    trainer = saved(tmp_path / "x.ckpt")
    module = Other()
    module.strict_loading = False
    with pytest.warns(UserWarning, match="was loaded in part: 40 tensor"):
        trainer_of().validate(module, data(), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert torch.equal(module.embed.weight, trainer.lightning_module.embed.weight)


def test_refuses_optimizer_state_of_other_shapes(tmp_path):
    """Otherwise the first step would fail, or broadcast silently."""
    saved(tmp_path / "x.ckpt")
    module = Net(hidden=6)
    module.strict_loading = False
    with pytest.raises(CheckpointError, match=r"optimizer's state of .*embed.weight: saved \(16, 8\).*init_from="):
        trainer_of(max_steps=4).fit(module, data(), ckpt_path=tmp_path / "x.ckpt")


class WithSGD(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoGroups(Net):
    def configure_optimizers(self) -> Any:
        own = [p for name, p in self.named_parameters() if name != "scale"]
        return torch.optim.AdamW([{"params": own}, {"params": [self.scale], "lr": 0.1}])


class FewerTrained(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for name, p in self.named_parameters() if name != "scale"])


class TwoOptimizers(Net):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.embed.parameters()), torch.optim.SGD([self.scale])]


@pytest.mark.parametrize(("kind", "text"), [
    (WithSGD, "another optimizer than SGD: it has no dampening, momentum"),
    (TwoGroups, "1 parameter group.*this one has 2"),
    (FewerTrained, "group 0.*unexpected: scale"),
    (TwoOptimizers, "holds 1 optimizer.*made 2"),
])  # fmt: skip
def test_refuses_different_optimizers_or_groups(tmp_path, kind, text):
    saved(tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=text):
        trainer_of().fit(kind(), data(), ckpt_path=tmp_path / "x.ckpt")


class Unserializable(pl.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"why": object()}


def test_refuses_unserializable_callback_state(tmp_path):
    trainer = trainer_of(options={"one_file": False}, callbacks=[Unserializable()])
    trainer.fit(Net(), data())
    with pytest.raises(CheckpointError, match="callbacks/Unserializable/why is a builtins.object"):
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert list(tmp_path.glob("*.ckpt")) == []


def test_in_lightnings_trainer(tmp_path):
    def trainer(**kwargs: Any) -> pl.Trainer:
        given = {**QUIET, "enable_checkpointing": True, "max_steps": kwargs.pop("steps"), **kwargs}
        return pl.Trainer(strategy=SingleDeviceStrategy(), devices=1, **given)

    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1, save_last="link")
    whole = Net(dropout=0)
    trainer(steps=12, callbacks=[saver]).fit(whole, data())
    assert (tmp_path / "last.ckpt").is_symlink()
    again = Net(dropout=0)
    trainer(steps=12, enable_checkpointing=False).fit(again, data(), ckpt_path=tmp_path / "step=8.ckpt")
    assert again.losses == whole.losses[8:]
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_top_k=1)
    run = trainer(steps=24, callbacks=[best])
    run.fit(Net(), data(), data())
    assert len(list((tmp_path / "best").iterdir())) == 1
    run.validate(ckpt_path="best", dataloaders=data(), verbose=False)
