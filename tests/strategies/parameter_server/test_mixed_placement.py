"""``strategy=hybrid`` with tables on parameter servers matches DDP."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parity.harness import make_trainer
from trainwright.recipes.tables.wide_deep import ClickData, WideDeep
from trainwright.strategies.compose.hybrid import HybridStrategy
from trainwright.strategies.contract.communication.meter import Sent
from trainwright.strategies.parameter_server.messages.wire import FIXED
from trainwright.strategies.parameter_server.tables.tables import find_tables

PLACEMENT = {"embedding.*": "parameter_server", "*": "shard"}
SMALL: dict[str, Any] = {"rows": 64, "wide_rows": 96, "dim": 4, "hidden": (8,)}


class TwoGroups(WideDeep):
    """Tables in both groups, one with options of its own, a schedule; a bag of embeddings, whose rows repeat; a table
    that most steps do not touch, in a group that was added later."""

    def __init__(self, optimizer: str, sparse: bool = False) -> None:
        super().__init__(sparse=sparse, **SMALL)
        self.kind = optimizer
        self.embedding["bag"] = nn.EmbeddingBag(32, 1, mode="sum", sparse=sparse, padding_idx=0)
        self.embedding["rare"] = nn.Embedding(16, 1, sparse=sparse)
        self.losses: list[float] = []

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        bag: Any = self.embedding["bag"]
        logits = super().forward(ids, dense) + bag(ids % 32)[:, 0]
        step = self.trainer.global_step
        # Looked up by all ranks, by none and by one.
        touched = self.training and (step == 1 or (step == 3 and self.trainer.is_global_zero))
        return logits + self.embedding["rare"](ids[:, 0] % 16)[:, 0] if touched else logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.losses.append(float(mean) / dist.get_world_size())
        return loss

    def configure_optimizers(self) -> Any:
        first = [*self.embedding["deep"].parameters(), *self.deep.parameters()]
        rest = [
            *self.embedding["wide"].parameters(),
            *self.embedding["bag"].parameters(),
            *self.wide_dense.parameters(),
        ]
        groups = [{"params": first}, {"params": rest, "lr": 0.02}]
        make = {
            "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
            "adagrad": partial(torch.optim.Adagrad, lr=0.05),
            "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        }[self.kind]
        optimizer = make(groups)
        optimizer.add_param_group({"params": list(self.embedding["rare"].parameters()), "lr": 0.3})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(strategy: str, options: dict[str, Any], kind: str, steps: int, ckpt: str | None = None, **more: Any) -> Any:
    sparse = more.pop("sparse", False)
    pl.seed_everything(3, verbose=False)
    torch.manual_seed(3 + dist.get_rank())  # the weights of the first rank count
    module = TwoGroups(kind, sparse)
    if strategy == "ddp":
        options = {"find_unused_parameters": True, **options}
    trainer = make_trainer(strategy, options, max_steps=steps, max_epochs=-1, limit_val_batches=2, **more)
    trainer.fit(module, ClickData(8, samples=60), ckpt_path=ckpt)
    return module, trainer


def outcome(module: Any, trainer: Any) -> tuple[dict[str, Tensor], list[float], float]:
    parameters = {name: value.clone() for name, value in trainer.strategy.whole_parameters()}
    return parameters, module.losses, float(trainer.callback_metrics["val_loss"])


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("adagrad", {"table_servers": 2}, {}),
    ("adamw", {"stage": 2}, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "val_check_interval": 2}),
    (
        "sgd",
        {"stage": 1, "table_servers": 2},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "precision": "16-mixed"},
    ),
    (
        "adamw",
        {"stage": 3, "shard": 1, "replicate": 2, "placement": {"embedding.*": "parameter_server"}},
        {"precision": "bf16-mixed"},
    ),
]


def against_ddp() -> Any:
    results = []
    for kind, options, more in CASES:
        theirs = outcome(*fit("ddp", {}, kind, 4, **more))
        ours = outcome(*fit("hybrid", {"placement": PLACEMENT, **options}, kind, 4, **more))
        results.append((ours, theirs))
    return results


def test_mixed_placement_matches_ddp(ranks):
    first, second = ranks(against_ddp, 2)
    for (ours, theirs), (others, _) in zip(first, second, strict=True):
        assert_equal_runs(ours, theirs)
        assert_equal_runs(others, theirs)
        # Rows come from one server, so they are bit-identical on both ranks.
        assert all(torch.equal(ours[0][name], others[0][name]) for name in ours[0] if name.startswith("embedding."))


def assert_equal_runs(ours: Any, theirs: Any) -> None:
    (parameters, losses, validated), (expected, their_losses, their_validated) = ours, theirs
    assert losses == pytest.approx(their_losses, rel=1e-5)
    assert validated == pytest.approx(their_validated, rel=1e-5)
    assert parameters.keys() == expected.keys()
    assert_close(parameters, expected)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=partial("{}: {}".format, name))


def across() -> Any:
    """Return the parameters of runs that change between mixed placement and DDP, and of one that does not."""
    mixed = {"placement": PLACEMENT, "table_servers": 2}
    results = {"whole": outcome(*fit("ddp", {}, "adamw", 6))[0]}
    for before, after in (("hybrid", "ddp"), ("ddp", "hybrid"), ("hybrid", "hybrid")):
        _, trainer = fit(before, mixed if before == "hybrid" else {}, "adamw", 3)
        path = f"{before}_{after}"
        trainer.save_checkpoint(path)
        module, trainer = fit(after, mixed if after == "hybrid" else {}, "adamw", 6, ckpt=path)
        results[path] = outcome(module, trainer)[0]
    from trainwright.callbacks.save.run_state import RunStateCheckpoint

    saver = RunStateCheckpoint("within", every_n_steps=3, save_at_end=False)
    fit("hybrid", mixed, "adamw", 4, callbacks=[saver], enable_checkpointing=True)
    results["within"] = outcome(*fit("ddp", {}, "adamw", 6, ckpt=saver.last_model_path))[0]
    return results


@pytest.mark.thorough
def test_run_states_move_between_mixed_placement_and_ddp(ranks):
    for results in ranks(across, 2):
        whole = results.pop("whole")
        for path, parameters in results.items():
            assert parameters.keys() == whole.keys(), path
            assert_close(parameters, whole)


class ReadsGradients(pl.Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


def refusals() -> Any:
    """Return the errors at the start of fits, on every rank."""
    texts = []
    for placement in (
        {"embeddings.*": "parameter_server"},
        {"deep.*": "parameter_server"},
        {"*.wide.*": "parameter_server", "embedding.wide.weight": "parameter_server"},
    ):
        with pytest.raises(ValueError, match="placement: ") as refused:
            fit("hybrid", {"placement": placement}, "adamw", 1)
        texts.append(str(refused.value))
    with pytest.raises(ValueError, match="placement with ") as refused:
        fit("hybrid", {"placement": PLACEMENT}, "adamw", 1, callbacks=[ReadsGradients()])
    return [*texts, str(refused.value)]


def test_pattern_errors_on_every_rank(ranks):
    words = [
        ["embeddings.* matches no parameter", "embedding.wide.weight"],
        ["deep.0.0.weight is no table"],
        ["earlier"],
        ["on_before_optimizer_step", "leave placement out"],
    ]
    for texts in ranks(refusals, 2):
        for text, expected in zip(texts, words, strict=True):
            assert all(word in text for word in expected), text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard": 1, "context": 2}, ["context=2", "type context=1"]),
        ({"placement": {"*": "parameter_server"}}, ["strategy=parameter_server"]),
        ({"placement": {}, "table_servers": 2}, ["table_servers=2", "without placement"]),
    ],
)
def test_option_errors(options, words):
    with pytest.raises(ValueError, match=words[0]) as refused:
        HybridStrategy(**{"placement": PLACEMENT, **options})
    assert all(word in str(refused.value) for word in words)


def test_unsupported_tables():
    module = nn.Module()
    module.table, module.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    module.head.weight = module.table.weight
    module.limited = nn.Embedding(8, 4, max_norm=1.0)
    with pytest.raises(ValueError, match=r"table.weight is tied to head.weight"):
        find_tables(module, ["table.weight"])
    with pytest.raises(ValueError, match=r"limited.weight has max_norm=1.0"):
        find_tables(module, ["limited.weight"])


class Watch(pl.Callback):
    """Measures held bytes, sent bytes and touched rows of the second step."""

    def __init__(self) -> None:
        self.rows = self.held = self.sent = self.pulled = 0
        self.is_number = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 1:
            return
        dist.barrier()
        self.meter = trainer.strategy.measures.measure_communication()
        dist.barrier()  # no rank pulls before the server's rank counts
        tables = [part for part in pl_module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
        self.hooks = [part.register_forward_pre_hook(self._count) for part in tables]
        self.is_number = any(part.weight.isfinite().any() for part in tables)

    def _count(self, part: Any, inputs: Any) -> None:
        self.rows += inputs[0].unique().numel() * part.embedding_dim

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 2:
            return
        self.held = trainer.strategy.measures.held_bytes().total
        tables = len(self.hooks)
        pulled = torch.tensor([self.rows * 4 + 8 * FIXED * (tables + 1)])  # with headers of each table and the step
        dist.all_reduce(pulled)
        self.pulled = int(pulled)
        if trainer.is_global_zero:  # its server may still be counting
            end = time.monotonic() + 30
            while self.sent < self.pulled and time.monotonic() < end:
                self.sent += int(self.meter.take().get(("server", "pull"), Sent()).bytes)
                time.sleep(0.01)
        else:
            self.sent = int(self.meter.take().get(("server", "pull"), Sent()).bytes)
        dist.barrier()  # others pull whole tables next
        self.meter.stop()
        for hook in self.hooks:
            hook.remove()


def watch() -> Any:
    seen = Watch()
    module, _ = fit("hybrid", {"placement": PLACEMENT, "stage": 2}, "adamw", 2, callbacks=[seen])
    tables = [p for name, p in module.named_parameters() if name.startswith("embedding.")]
    dense = sum(p.numel() for p in module.parameters()) - sum(table.numel() for table in tables)
    after = all(table.isfinite().all() for table in tables)
    return {name: getattr(seen, name) for name in ("sent", "pulled", "held", "is_number")}, dense, after


def test_ranks_pull_rows_and_hold_no_table(ranks):
    (first, _, after), (second, dense, _) = ranks(watch, 2)
    assert first["sent"] == first["pulled"]
    assert second["sent"] == 0  # no server
    # Parameters, gradients and half of Adam's states, without tables.
    assert second["held"] < 4 * dense * 4
    assert after
    assert not first["is_number"]
