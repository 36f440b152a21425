"""Writer of checkpoints in the format of DeepSpeed 0.19.8, without DeepSpeed.

Checked against real ones of stages 1 to 3, on two and three ranks, in fp32 and bfloat16, with sub-groups, and
of DeepSpeed's bfloat16 optimizer.
"""

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

STEP = 5.0
VERSION = "0.19.8"
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-08, "decoupled_weight_decay": True}


class ZeroStageEnum(IntEnum):
    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 1.0
        self.dynamic = False


class fragment_address:
    def __init__(self, numel: int, start: int) -> None:
        self.numel = numel
        self.start = start


_CLASSES = {
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
    fragment_address: "deepspeed.utils.tensor_fragment",
}


@contextmanager
def deepspeed_modules() -> Iterator[None]:
    """While it is open, the classes above are pickled under DeepSpeed's names."""
    homes = {cls: cls.__module__ for cls in _CLASSES}
    modules = {}
    for cls, home in _CLASSES.items():
        parts = home.split(".")
        for name in [".".join(parts[: count + 1]) for count in range(len(parts))]:
            modules.setdefault(name, ModuleType(name))
        setattr(modules[home], cls.__name__, cls)
        cls.__module__ = home
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        for cls, home in homes.items():
            cls.__module__ = home


@dataclass
class Trained:
    """What was trained.

    Args:
        groups: master weights by name, group by group.
        moments: of each of them, ``exp_avg`` and ``exp_avg_sq``.
        frozen: parameters that no optimizer knew.
        buffers: that are saved.
        shared: other names of parameters.
        order: names of all of the above, as the module has them.
    """

    groups: list[dict[str, Tensor]]
    moments: dict[str, dict[str, Tensor]]
    frozen: dict[str, Tensor]
    buffers: dict[str, Tensor]
    shared: dict[str, str]
    order: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: weight for group in self.groups for name, weight in group.items()}

    def everything(self) -> dict[str, Tensor]:
        """All weights, as they should be read."""
        found = {**self.frozen, **self.buffers, **self.parameters}
        return {**found, **{name: found[origin] for name, origin in self.shared.items()}}


def make_trained(seed: int = 0, frozen_dtype: torch.dtype = torch.float32) -> Trained:
    """A small module whose sizes fit no number of ranks."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    groups = [
        {"emb.weight": random(13, 7), "back.weight": random(7, 5)},
        {"scalar": random(1), "back.bias": random(7), "norm.weight": random(7), "norm.bias": random(3, 2, 2)},
    ]
    moments = {
        name: {"exp_avg": random(*weight.shape), "exp_avg_sq": random(*weight.shape).abs()}
        for group in groups
        for name, weight in group.items()
    }
    buffers = {"table": torch.arange(5.0), "norm.seen": torch.tensor(3)}
    return Trained(groups, moments, {"frozen.weight": random(5, 7).to(frozen_dtype)}, buffers, {"head": "emb.weight"})


def write_deepspeed(
    folder: Path,
    trained: Trained,
    *,
    stage: int,
    ranks: int,
    dtype: torch.dtype = torch.float32,
    sub_groups: list[list[str]] | None = None,
    bf16_optimizer: bool = False,
    client: dict[str, Any] | None = None,
    ds_config: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of the step 5.

    Args:
        folder: that DeepSpeed would be given.
        trained: what to write.
        stage: of ZeRO.
        ranks: data-parallel ranks.
        dtype: of the module.
        sub_groups: under stage 3, the names that lie in one flat tensor; ``None``: those of a group.
        bf16_optimizer: as DeepSpeed's optimizer for bfloat16 writes, which does not know its stage and strips nothing.
        client: what the caller of DeepSpeed adds.
        ds_config: DeepSpeed's configuration.

    Returns:
        The folder of the step.
    """
    step = folder / "global_step5"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    config = ds_config or {"zero_optimization": {"stage": stage}}
    with deepspeed_modules():
        if stage == 3:
            _write_stage_3(step, trained, ranks, dtype, sub_groups, client or {}, config)
        else:
            _write_stage_1_or_2(step, trained, stage, ranks, dtype, bf16_optimizer, client or {}, config)
    return step


def _model_states(
    trained: Trained, shapes: list[dict[str, Tensor]], module: dict[str, Tensor], ranks: int
) -> dict[str, Any]:
    return {
        "module": OrderedDict((name, module[name]) for name in trained.order or module),
        "buffer_names": list(trained.buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict((name, weight.shape) for name, weight in group.items()) for group in shapes],
        "frozen_param_shapes": OrderedDict((name, weight.shape) for name, weight in trained.frozen.items()),
        "shared_params": dict(trained.shared),
        "frozen_param_fragments": None,
        "lr_scheduler": {"last_batch_iteration": 4},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 5,
        "global_samples": 20 * ranks,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_version": VERSION,
    }


def _options(trained: Trained, flats_of_group: list[list[int]]) -> list[dict[str, Any]]:
    decay = [{"weight_decay": 0.1, "name": "decay"}, {"weight_decay": 0.0}]
    return [{**decay[index], **OPTIONS, "params": flats} for index, flats in enumerate(flats_of_group)]


def _write_stage_1_or_2(
    step: Path,
    trained: Trained,
    stage: int,
    ranks: int,
    dtype: torch.dtype,
    bf16_optimizer: bool,
    client: dict[str, Any],
    config: dict[str, Any],
) -> None:
    module = {**trained.everything(), **{name: weight.to(dtype) for name, weight in trained.parameters.items()}}
    module.update({name: module[origin] for name, origin in trained.shared.items()})
    state = _model_states(trained, trained.groups, module, ranks)
    if stage == 1:
        state["frozen_param_shapes"] = None
    else:
        state["frozen_param_fragments"] = OrderedDict(trained.frozen)
    torch.save({**state, "ds_config": config, **client}, step / "mp_rank_00_model_states.pt")
    prefix = "bf16_" if bf16_optimizer or dtype is torch.bfloat16 else ""
    for rank in range(ranks):
        own = _rank_of_stage_1_or_2(trained, stage, ranks, rank, bf16_optimizer)
        value = {"optimizer_state_dict": own, "ds_config": config, "ds_version": VERSION}
        torch.save(value, step / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def _rank_of_stage_1_or_2(trained: Trained, stage: int, ranks: int, rank: int, bf16_optimizer: bool) -> dict[str, Any]:
    weights, states, paddings, slices = [], {}, [], []
    for index, group in enumerate(trained.groups):
        flat = _padded(torch.cat([weight.reshape(-1) for weight in group.values()]), 2 * ranks)
        held = sum(weight.numel() for weight in group.values())
        size = flat.numel() // ranks
        padding = min(max((rank + 1) * size - held, 0), size)
        part = flat[rank * size : (rank + 1) * size]
        weights.append(part.clone() if bf16_optimizer else part[: size - padding].clone())
        paddings.append(padding)
        slices.append(_slices(group, rank, size))
        moments = {
            key: _padded(torch.cat([trained.moments[name][key].reshape(-1) for name in group]), 2 * ranks)
            for key in ("exp_avg", "exp_avg_sq")
        }
        states[index] = {"step": torch.tensor(STEP)} | {
            key: value[rank * size : (rank + 1) * size].clone() for key, value in moments.items()
        }
    base = {"state": states, "param_groups": _options(trained, [[index] for index in range(len(trained.groups))])}
    value: dict[str, Any] = {
        "clip_grad": 1.0,
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": weights,
        "group_paddings": paddings,
        "partition_count": [ranks] * len(trained.groups),
        "ds_version": VERSION,
        "param_slice_mappings": slices,
    }
    if not bf16_optimizer:
        value |= {"loss_scaler": LossScaler(), "dynamic_loss_scale": False, "overflow": False}
        value |= {
            "zero_stage": ZeroStageEnum(stage),
            "param_alignment_paddings": [[0] * len(g) for g in trained.groups],
        }
    return value


def _slices(group: dict[str, Tensor], rank: int, size: int) -> dict[str, fragment_address]:
    found = OrderedDict()
    begin = 0
    for name, weight in group.items():
        first, last = max(begin, rank * size), min(begin + weight.numel(), (rank + 1) * size)
        if first < last:
            found[name] = fragment_address(last - first, first - rank * size)
        begin += weight.numel()
    return found


def _write_stage_3(
    step: Path,
    trained: Trained,
    ranks: int,
    dtype: torch.dtype,
    sub_groups: list[list[str]] | None,
    client: dict[str, Any],
    config: dict[str, Any],
) -> None:
    parameters = trained.parameters
    names = sub_groups or [list(group) for group in trained.groups]
    flats_of_group = [[index for index, own in enumerate(names) if own[0] in group] for group in trained.groups]
    stand_in = torch.empty(0, dtype=dtype)
    module = {name: trained.buffers.get(name, stand_in) for name in trained.everything()}
    state = _model_states(trained, [{name: parameters[name] for name in own} for own in names], module, ranks)
    for rank in range(ranks):
        state["frozen_param_fragments"] = OrderedDict(
            (name, _part(weight, rank, ranks)) for name, weight in trained.frozen.items()
        )
        if rank:
            state["shared_params"] = {}
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({**state, "ds_config": config, **client}, step / f"{prefix}_model_states.pt")
        flats = [torch.cat([_part(parameters[name], rank, ranks) for name in own]) for own in names]
        held = {
            index: {"step": torch.tensor(STEP)}
            | {
                key: torch.cat([_part(trained.moments[name][key], rank, ranks) for name in own])
                for key in ("exp_avg", "exp_avg_sq")
            }
            for index, own in enumerate(names)
        }
        value = {
            "zero_stage": ZeroStageEnum.weights,
            "loss_scaler": LossScaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": ranks,
            "optimizer_state_dict": {"state": held, "param_groups": _options(trained, flats_of_group)},
            "fp32_flat_groups": flats,
        }
        prefix = ("bf16_" if dtype is torch.bfloat16 else "") + prefix
        torch.save(
            {"optimizer_state_dict": value, "ds_config": config, "ds_version": VERSION},
            step / f"{prefix}_optim_states.pt",
        )


def write_universal(folder: Path, trained: Trained, stage: int) -> Path:
    """Write the output of DeepSpeed's ``ds_to_universal`` for two ranks.

    Returns:
        The folder itself, which is also that of the step.
    """
    source = write_deepspeed(folder.parent / f"{folder.name}_source", trained, stage=stage, ranks=2)
    zero = folder / "zero"
    for name, weight in trained.parameters.items():
        own = zero / name
        own.mkdir(parents=True)
        states = {"fp32": weight, **trained.moments[name]}
        for key, value in states.items():
            # Stage 3 writes flat tensors, and the steps elsewhere.
            torch.save(value.reshape(-1) if stage == 3 else {"param": value, "cat_dim": 0}, own / f"{key}.pt")
        if stage < 3:
            torch.save(torch.tensor(STEP), own / "step.pt")
    with deepspeed_modules():
        common: dict[str, Any] = {"zero_stage": ZeroStageEnum(stage), "loss_scaler": LossScaler()}
        groups = _options(trained, [[0], [1]])
        common |= {"param_groups": groups, "partition_count": 2 if stage == 3 else [2, 2]}
        if stage == 3:
            steps = {index: {"step": torch.tensor(STEP)} for index in range(2)}
            common["optimizer_state_dict"] = {"state": steps, "param_groups": groups}
        torch.save(common, zero / "optimizer_state.pt")
    for file in source.glob("*model_states.pt"):
        file.rename(folder / file.name)
    return folder


def _padded(flat: Tensor, multiple: int, value: float = 0.0) -> Tensor:
    return torch.cat([flat, flat.new_full((-flat.numel() % multiple,), value)])


def _part(weight: Tensor, rank: int, ranks: int) -> Tensor:
    size = math.ceil(weight.numel() / ranks)
    # The padding of DeepSpeed is uninitialized.
    return _padded(weight.reshape(-1), ranks, math.nan)[rank * size : (rank + 1) * size].clone()
