"""ZeRO, offload, pipelines, tensor, sequence and expert parallelism: `strategy` and its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainwright.tools.deepspeed.table import APPROXIMATED, AUTO, MAPPED, UNSUPPORTED
from trainwright.tools.deepspeed.translation import Translation

STAGE = "zero_optimization.stage"
_ZERO = "zero_optimization"
_MIB = 2**20
_AXES = {
    "pipeline": ("pipeline.stages",),
    "tensor": ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size", "tensor_parallel.tensor_parallel.tp_size"),
    "context": ("sequence_parallel_size",),
    "expert": ("expert_parallel.autoep_size",),
}


@dataclass(frozen=True)
class RequestedLayout:
    """Layout requested by a file.

    Attributes:
        stage: of ZeRO, 0 to 3.
        axes: sizes of pipeline, tensor, context and expert axes larger than 1.
        replicates: whether gradients are averaged over whole replicas, so that they can be compressed.
        data_ranks: ranks that read different samples; None: unknown.
    """

    stage: int
    axes: dict[str, int]
    replicates: bool
    data_ranks: int | None


def translate_layout(t: Translation, precision: str) -> RequestedLayout:
    """Decide the strategy and its keys."""
    stage = _stage(t)
    found = {axis: _axis(t, axis) for axis in _AXES}
    axes = {axis: size for axis, (size, _) in found.items() if size > 1}
    by = STAGE if t.has(STAGE) or not t.has(_ZERO) else _ZERO
    if axes:
        first = next(iter(axes))
        by = by if t.has(by) else found[first][1]
        t.set("strategy", "hybrid", by=by)
        for axis, size in axes.items():
            t.set(f"strategy.{axis}", size, by=found[axis][1])
        if "context" in axes:
            t.set("strategy.attention", "ulysses", by=found["context"][1])
        _state_axes(t, stage, axes, by)
    else:
        t.set("strategy", f"zero{stage}" if stage else "ddp", by=by)
    if not t.has(by):
        t.note_absent(by, "Stage 0: nothing is sharded.")
    groups = _mics(t, stage)
    _offload(t, stage)
    _buckets(t, stage, precision)
    _unused(t, stage)
    _pipeline_options(t, axes)
    _options_of_axes(t, axes)
    return RequestedLayout(stage, axes, _replicates(t, stage, axes, groups), _data_ranks(t, axes))


def _stage(t: Translation) -> int:
    if t.has(_ZERO):
        return 1 if t.given.values[_ZERO] else 0
    return int(t.value(STAGE, 0))


def _axis(t: Translation, axis: str) -> tuple[int, str]:
    """Return the size of an axis and its key; a typed size overrides the file's."""
    path = next((path for path in _AXES[axis] if t.has(path)), _AXES[axis][0])
    typed = t.typed.value(f"strategy.{axis}")
    if isinstance(typed, int) and typed > 1:
        return typed, path
    value: Any = t.value(path, 1)
    if value == AUTO:
        return _stages_of_recipe(t, path), path
    if axis != "expert" and t.world_size is not None and value > 1 and t.world_size % value:
        t.refuse(
            f"{path} is {value}, which does not divide the {t.world_size} rank(s) of the run; type devices=<a multiple "
            f"of {value}>"
        )
    return max(1, value), path


def _stages_of_recipe(t: Translation, path: str) -> int:
    stages = 1 if t.recipe is None else t.recipe.axes.get("pipeline", 1)
    if stages == 1:
        t.say(
            path,
            UNSUPPORTED,
            "DeepSpeed defines the stages in the model's code. Type strategy.pipeline=<stages>, or remove the "
            "key for a run without a pipeline.",
        )
    return stages


def _state_axes(t: Translation, stage: int, axes: dict[str, int], by: str) -> None:
    """Set ZeRO options within a hybrid layout."""
    t.set("strategy.stage", max(1, stage), by=by)
    if stage:
        return
    if "expert" in axes:
        t.note_absent(
            "zero_optimization",
            "Experts are distributed over ranks that shard state, so optimizer state is sharded too (stage 1): same "
            "numbers in less memory.",
        )
        return
    t.set("strategy.shard", 1, by=by)
    t.set("strategy.replicate", -1, by=by)


def _mics(t: Translation, stage: int) -> int | None:
    path = f"{_ZERO}.mics_shard_size"
    size = t.value(path, -1)
    if not isinstance(size, int) or size <= 0:
        return None
    if stage == 0:
        t.say(path, UNSUPPORTED, "Stage 0 shards nothing; type strategy=zero3.")
        return None
    if t.world_size is not None and t.world_size % size:
        t.refuse(f"{path} is {size}, which does not divide the {t.world_size} rank(s) of the run")
    t.set("strategy.shard", size, by=path)
    t.set("strategy.replicate", -1, by=path)
    return size


def _offload(t: Translation, stage: int) -> None:
    parameters = _device(t, "offload_param", "cpu_offload_param", "cpu_offload_params")
    optimizer = _device(t, "offload_optimizer", "cpu_offload")
    zenflow = next(iter(t.paths(f"{_ZERO}.zenflow")), None)
    if parameters is not None and stage != 3:
        t.say(
            parameters,
            UNSUPPORTED,
            f"Only stage 3 shards parameters, and this is stage {stage}: they stay on the device, as in DeepSpeed. "
            "Write stage 3, or remove the section.",
        )
        parameters = None
    if optimizer is not None and stage == 0:
        t.say(optimizer, UNSUPPORTED, "Stage 0 shards nothing, so there is nothing to offload; write stage 1.")
        optimizer = None
    if parameters is not None:
        t.set("strategy.offload", "parameters", by=parameters)
        if optimizer is None:
            t.note_absent(
                f"{_ZERO}.offload_optimizer", "With offloaded parameters, optimizer state is in host memory too."
            )
    elif optimizer is not None:
        t.set("strategy.offload", "optimizer", by=optimizer)
    elif zenflow is not None and stage:
        t.set("strategy.offload", "optimizer", by=zenflow)
        t.say(zenflow, APPROXIMATED, "Every gradient is applied in its own step.")
    for path in filter(None, (parameters, optimizer)):
        if t.value(path) == "nvme":
            note = "In host memory instead of a drive, which must be large enough (trainwright layout shows the bytes)."
            t.say(path, APPROXIMATED, note)
        else:
            t.say(path)


def _device(t: Translation, section: str, *old: str) -> str | None:
    """Return the key that requests offloading; None if there is none."""
    path = f"{_ZERO}.{section}.device"
    if t.value(path, "none") != "none":
        return path
    return next((f"{_ZERO}.{name}" for name in old if t.value(f"{_ZERO}.{name}")), None)


def _buckets(t: Translation, stage: int, precision: str) -> None:
    path = f"{_ZERO}.reduce_bucket_size"
    elements = t.value(path, AUTO)
    if elements != AUTO and stage in (1, 2):
        width = 2 if precision == "bf16-true" else 4
        t.set("strategy.bucket_mib", round(elements * width / _MIB, 3), by=path)


def _unused(t: Translation, stage: int) -> None:
    path = f"{_ZERO}.ignore_unused_parameters"
    value = t.value(path)
    if value is None:
        if stage in (1, 2):
            t.note_absent(
                path,
                "DeepSpeed skips parameters without gradients; here they are errors. Type "
                "strategy.find_unused_parameters=true for a model with some.",
            )
    elif stage == 3:
        t.say(path, MAPPED, "Stage 3 accepts parameters without gradients, here and in DeepSpeed.")
    else:
        t.set("strategy.find_unused_parameters", value, by=path)


def _pipeline_options(t: Translation, axes: dict[str, int]) -> None:
    path = "pipeline.activation_checkpoint_interval"
    interval = t.value(path, 0)
    if interval > 0:
        t.set("strategy.activation_checkpointing", "full", by=path)
        t.say(path, MAPPED if interval == 1 else APPROXIMATED)
    path = "pipeline.partition"
    partition = t.value(path)
    if partition is None or "pipeline" not in axes:
        return
    if partition in ("best", "parameters", "uniform"):
        t.set("strategy.split", "balanced", by=path)
    if partition == "uniform":
        t.say(
            path,
            APPROXIMATED,
            "Balanced by parameters, not by the number of layers; strategy.split=[3,3] sets the number per stage.",
        )
    elif partition not in ("best", "parameters"):
        t.say(path, UNSUPPORTED, "Blocks are found in the model; strategy.blocks and strategy.split override that.")


def _options_of_axes(t: Translation, axes: dict[str, int]) -> None:
    path = "tensor_parallel.vocab_parallel_lm_head"
    if "tensor" in axes and t.value(path):
        t.set("strategy.loss_parallel", True, by=path)
    if t.value("expert_parallel.enabled"):
        t.say("expert_parallel.enabled")


def _replicates(t: Translation, stage: int, axes: dict[str, int], group: int | None) -> bool:
    """Return whether there are several whole copies of the state."""
    typed = t.typed.value("strategy.replicate")
    if isinstance(typed, int):
        return typed != 1
    ranks = _data_ranks(t, {axis: size for axis, size in axes.items() if axis != "expert"})
    if stage == 0 and "expert" not in axes:
        return ranks is None or ranks > 1
    return group is not None and (ranks is None or ranks > group)


def _data_ranks(t: Translation, axes: dict[str, int]) -> int | None:
    world = t.world_size
    if world is None:
        return None
    for axis in ("pipeline", "tensor", "context"):
        world //= axes.get(axis, 1)
    return max(1, world)
