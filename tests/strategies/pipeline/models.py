"""Models and helpers for the tests of the pipeline engine."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright.strategies.base.certificate.written import AsWritten
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.engine import PipelineEngine
from trainwright.strategies.pipeline.schedules import split_blocks, stages_of_rank, stages_per_rank_of
from trainwright.strategies.plan.model_plan import ModelPlan

WIDTH, WORDS = 8, 11


@dataclasses.dataclass
class Hidden:
    x: Tensor
    depth: int


class Block(nn.Module):
    """One block; ``style`` is the structure of its input and output."""

    def __init__(self, style: str = "tensor") -> None:
        super().__init__()
        self.style = style
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any, mask: Tensor | None = None, *, scale: float = 1.0) -> Any:
        hidden = x if self.style in ("tensor", "view", "inplace") else x.x if self.style == "dataclass" else x[
            "x" if self.style == "dict" else 0
        ]  # fmt: skip
        if self.style == "inplace":
            hidden = hidden.mul_(0.9)
        if mask is not None:
            hidden = hidden * mask[..., None]
        out = hidden + scale * self.outer(torch.tanh(self.inner(self.norm(hidden))))
        if self.style == "tuple":
            return out, x[1] + out.square().mean((1, 2), keepdim=True), x[2]
        if self.style == "fresh":
            return out + x[1], 0.3 * self.norm.bias + self.inner.weight[0]
        if self.style == "dict":
            return {"x": out, "depth": x["depth"] + 1, "none": None}
        if self.style == "dataclass":
            return Hidden(out, x.depth + 1)
        return out.transpose(0, 1).transpose(0, 1) if self.style == "view" else out


class Model(nn.Module):
    """A small language model with the methods of a LightningModule that the engine needs."""

    def __init__(self, blocks: int = 4, style: str = "tensor", tied: bool = False, named: bool = False) -> None:
        super().__init__()
        self.style = style
        self.embed = nn.Embedding(WORDS, WIDTH)
        layers = [Block(style) for _ in range(blocks)]
        self.layers: Any = nn.ModuleDict({f"b{i}": b for i, b in enumerate(layers)}) if named else nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(1))
        self.logged: list[Any] = []

    def log(self, name: str, value: Any, prog_bar: bool = False, **kwargs: Any) -> None:
        self.logged.append((name, float(torch.as_tensor(value).detach()), prog_bar, kwargs))

    def hidden(self, ids: Tensor) -> Tensor:
        x: Any = self.embed(ids)
        mask = (ids != 0).to(x.dtype)
        if self.style == "tuple":
            x = (x, x.new_zeros(len(x), 1, 1), ids)
        elif self.style == "fresh":
            x = (x, x.new_zeros(WIDTH))
        elif self.style == "dict":
            x = {"x": x, "depth": 0, "none": None}
        elif self.style == "dataclass":
            x = Hidden(x, 0)
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = layer(x, mask=mask, scale=0.5)
        if self.style in ("tuple", "fresh"):
            return self.norm(x[0]) + 0.1 * x[1]
        if self.style in ("dict", "dataclass"):
            depth = x["depth"] if self.style == "dict" else x.depth
            return self.norm(x["x"] if self.style == "dict" else x.x) / depth
        return self.norm(x)

    def logits(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        ids = batch["ids"]
        logits = self.logits(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        self.log("train_loss", loss, True, on_step=True)
        return loss


def plan_of(model: Model, **changes: Any) -> ModelPlan:
    keys = model.layers.keys() if isinstance(model.layers, nn.ModuleDict) else range(len(model.layers))
    values: dict[str, Any] = {
        "blocks": tuple(f"layers.{key}" for key in keys),
        "first": ("embed",),
        "last": ("norm", "head"),
    }
    return ModelPlan(**{**values, **changes})


def make_batch(samples: int = 8, length: int = 6, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(0, WORDS, (samples, length), generator=generator)}


def build(make: Callable[..., Model] = Model, *args: Any, **kwargs: Any) -> Model:
    torch.manual_seed(0)
    return make(*args, **kwargs)


class Steps:
    """Runs of a model's step without a strategy."""

    engine: PipelineEngine

    def __init__(self, model: Any, written: AsWritten) -> None:
        self.model, self.written = model, written

    def run(self, args: Any, kwargs: Any, rehearses: bool = False) -> Any:
        return self.engine.call(lambda: self.model.training_step(*args, **kwargs))

    look = run

    def whole(self, name: str) -> Tensor:
        return self.model.get_parameter(name)


def engine_of(
    model: Any, schedule: str = "1f1b", micro_batches: int = 4, plan: ModelPlan | None = None, **kwargs: Any
) -> PipelineEngine:
    """An engine over the default group, attached."""
    plan = plan or plan_of(model)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    stages = ranks * stages_per_rank_of(schedule, kwargs.pop("stages_per_rank", None))
    spans = split_blocks([1.0] * len(plan.blocks), stages)
    cut = PipelineCut(model, plan, spans, stages_of_rank(rank, ranks, stages, schedule))
    written = AsWritten.of(model)
    cut.apply()
    written.set_up()
    steps = Steps(model, written)
    steps.engine = engine = PipelineEngine(
        model,
        cut,
        group=dist.group.WORLD,  # type: ignore[arg-type]
        schedule=schedule,
        micro_batches=micro_batches,
        device=torch.device("cpu"),
        steps=steps,
        **kwargs,
    )
    engine.attach()
    return engine


def train(
    engine: PipelineEngine,
    batch: Any,
    index: int = 0,
    scale: Callable[[Tensor, float], Tensor] = lambda loss, share: loss * share,
) -> Any:
    return engine.train((batch,), {"batch_idx": index}, batch=batch, scale=scale)


def reference(model: Model, *batches: Any, scale: float = 1.0) -> tuple[list[Any], dict[str, Tensor]]:
    """Return results and accumulated gradients of one process."""
    whole, results = copy.deepcopy(model), []
    for batch in batches:
        output = whole.training_step(batch, 0)
        results.append(output)
        ((output["loss"] if isinstance(output, dict) else output) * scale).backward()
    return results, {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def worst_gradient(model: nn.Module, engine: PipelineEngine, expected: dict[str, Tensor]) -> float:
    """Return the largest error of an owned gradient; tied parameters are summed over their ranks, frozen have none."""
    worst = 0.0
    for name, stages in engine.cut.holders.items():
        if name not in expected:
            assert name not in engine.cut.owned or model.get_parameter(name).grad is None
            continue
        holding = {engine._ranks[stage] for stage in stages}
        gradient = torch.zeros_like(expected[name])
        if name in engine.cut.owned:
            own = dict(model.named_parameters())[name].grad
            assert own is not None, f"{name} has no gradient"
            gradient = own.clone()
        if len(holding) > 1:
            dist.all_reduce(gradient)
        if name in engine.cut.owned:
            worst = max(worst, float((gradient - expected[name]).abs().max()))
    return worst
