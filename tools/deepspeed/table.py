"""Keys of DeepSpeed's configuration that are mapped to options or stop a run; all others have no effect.

They follow DeepSpeed's documentation, "DeepSpeed Configuration JSON", and the models with which DeepSpeed 0.19 parses a
file, plus dropped keys that files still have. docs/deepspeed.md documents the translation of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAPPED, APPROXIMATED, UNSUPPORTED = "mapped", "approximated", "unsupported"
STATUSES = (MAPPED, APPROXIMATED, UNSUPPORTED)
AUTO = "auto"

BOOL, WHOLE, NUMBER, TEXT, LIST, MAPPING, ANY = "bool", "whole", "number", "text", "list", "mapping", "any"
RATES = "rates"  # a number, or one per parameter group
KINDS = {
    BOOL: "true or false",
    WHOLE: "a whole number",
    NUMBER: "a number",
    TEXT: "text",
    LIST: "a list",
    MAPPING: "a mapping",
    ANY: "any value",
    RATES: "a number, or a list of numbers",
}


@dataclass(frozen=True)
class Key:
    """A key that is mapped to an option, or that stops a run.

    Attributes:
        path: dotted path in the file.
        kind: type of its value, see `KINDS`.
        becomes: native key that takes its value; empty: decided by code.
        note: how the native configuration differs, or why a run is refused, with a remedy.
        status: mapped, approximated or, for a key that stops a run, unsupported.
        words: allowed values; empty: any of the kind.
        auto: whether "auto" is allowed.
        least: smallest value; None: any.
        sets: native key and value if the value is true, not 0 and not empty; None: decided by code.
        harmless: for a key that stops a run, the value with which it does not.
    """

    path: str
    kind: str
    becomes: str = ""
    note: str = ""
    status: str = MAPPED
    words: tuple[Any, ...] = ()
    auto: bool = False
    least: int | None = None
    sets: tuple[str, Any] | None = None
    harmless: Any = False


def alike(section: str, kind: str, names: str, **common: Any) -> tuple[Key, ...]:
    """Return keys that differ only in their names.

    Args:
        section: path of their section; empty: the file.
        kind: of their values.
        names: separated by spaces.
        **common: other fields of :class:`Key`.
    """
    return tuple(Key(f"{section}.{name}".lstrip("."), kind, **common) for name in names.split())


def taken(section: str, kind: str, **names: str) -> tuple[Key, ...]:
    """Return keys of a section whose values native keys take: DeepSpeed's name and that of the native key."""
    return tuple(Key(f"{section}.{name}", kind, becomes) for name, becomes in names.items())


def near(path: str, note: str = "", kind: str = BOOL, **more: Any) -> Key:
    """Return a key whose native configuration differs, as the note says."""
    return Key(path, kind, note=note, status=APPROXIMATED, **more)


def stop(path: str, note: str, kind: str = BOOL, harmless: Any = False, words: tuple[Any, ...] = ()) -> Key:
    """Return a key that stops a run, except with its harmless value."""
    return Key(path, kind, "", note, UNSUPPORTED, words, harmless=harmless)


Tree = dict[str, "Tree"]
_BATCH = "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"
_DEVICES = ("none", "cpu", "nvme")
_DTYPES = ("bfloat16", "bf16", "torch.bfloat16", "float16", "fp16", "half", "torch.float16")
_MIXED = "DeepSpeed's weights have 16 bits with float32 copies; here weights and gradients are float32 (autocast)."
_OPT_LEVEL = "O0: precision=32. O1, O2: 16-mixed. O3, pure float16, is not supported: 16-mixed."
_AVERAGED = "Gradients are averaged, never summed. With plain SGD, multiply the learning rate by the data ranks."
_STATES = "bf16_master_weights_and_grads bf16_optimizer_states"
_RECOMPUTED = "Every block is recomputed; its inputs stay on the device."
_ZENFLOW = (
    "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio full_warm_up_rounds "
    "pt_reserved_cores_perc steps_per_epoch"
)
_ASYNC = ("checkpoint", "async")
_FULL = ("strategy.activation_checkpointing", "full")
_COMPILE = ("strategy.compile", True)

_TRAINING = (
    *alike("", WHOLE, _BATCH, auto=True, least=1),
    Key("gradient_clipping", NUMBER, auto=True, least=0),
    Key("optimizer.type", TEXT),
    *alike("optimizer.params", NUMBER, "lr weight_decay momentum", auto=True),
    Key("optimizer.params.betas", LIST, auto=True),
    Key("optimizer.params.eps", RATES, auto=True),
    *alike("optimizer.params", NUMBER, "dampening alpha lambd t0 rho lr_decay initial_accumulator_value"),
    *alike("optimizer.params", NUMBER, "momentum_decay beta2_decay d"),
    *alike("optimizer.params", BOOL, "nesterov centered amsgrad maximize decoupled_weight_decay"),
    *alike("optimizer.params", BOOL, "torch_adam adam_w_mode"),
    Key("optimizer.params.freeze_step", WHOLE),
    near("optimizer.params.var_freeze_step", kind=WHOLE),
    near("optimizer.params.max_grad_norm", kind=NUMBER),
    stop("optimizer.params.bias_correction", "torch's Adam always has bias correction; remove the key.", BOOL, True),
    Key("scheduler.type", TEXT),
    Key("scheduler.params.warmup_min_lr", RATES, "lowest", auto=True),
    Key("scheduler.params.warmup_max_lr", RATES, "highest", auto=True),
    Key("scheduler.params.warmup_num_steps", WHOLE, "warmup_steps", auto=True),
    Key("scheduler.params.warmup_type", TEXT, "shape", words=("log", "linear")),
    Key("scheduler.params.total_num_steps", WHOLE, "total_steps", auto=True),
    *taken("scheduler.params", NUMBER, warmup_min_ratio="first_part", cos_min_ratio="last_part"),
    Key("scheduler.params.lr_range_test_min_lr", RATES, "lowest"),
    Key("scheduler.params.lr_range_test_step_size", WHOLE, "every"),
    Key("scheduler.params.lr_range_test_step_rate", NUMBER, "growth"),
    Key("scheduler.params.lr_range_test_staircase", BOOL, "staircase"),
    *taken("scheduler.params", RATES, cycle_min_lr="lowest", cycle_max_lr="highest"),
    Key("scheduler.params.decay_lr_rate", NUMBER, "decay"),
    *taken("scheduler.params", NUMBER, cycle_first_step_size="up_steps", cycle_second_step_size="down_steps"),
    *taken("scheduler.params", WHOLE, cycle_first_stair_count="up_stairs", cycle_second_stair_count="down_stairs"),
    Key("scheduler.params.decay_step_size", NUMBER, "decay_every"),
    Key("scheduler.params.cycle_momentum", BOOL, "cycle_momentum"),
    *taken("scheduler.params", RATES, cycle_min_mom="lowest_momentum", cycle_max_mom="highest_momentum"),
    Key("scheduler.params.decay_mom_rate", NUMBER, "momentum_decay"),
)

_PRECISION = (
    *(near(f"{mode}.enabled", _MIXED, auto=True) for mode in ("fp16", "bf16", "bfloat16")),
    *alike("fp16", NUMBER, "loss_scale min_loss_scale"),
    Key("fp16.initial_scale_power", WHOLE),
    Key("fp16.loss_scale_window", WHOLE, least=1),
    *alike("bf16", BOOL, _STATES),
    *alike("bfloat16", BOOL, _STATES),
    Key("torch_autocast.enabled", BOOL),
    Key("torch_autocast.dtype", TEXT, words=_DTYPES),
    near("amp.enabled", "torch's autocast instead of Apex.", auto=True),
    near("amp.opt_level", _OPT_LEVEL, TEXT, words=("O0", "O1", "O2", "O3"), auto=True),
    near("amp.loss_scale", kind=ANY),
    Key("communication_data_type", TEXT, words=("fp32", "fp16", "bf16")),
    Key("fp32_allreduce", BOOL, note="Gradients are averaged in float32 with compression=none."),
    stop("gradient_allreduce_op", _AVERAGED, TEXT, "mean", ("mean", "sum")),
)

_LAYOUT = (
    Key("zero_optimization", BOOL),
    Key("zero_optimization.stage", WHOLE, words=(0, 1, 2, 3)),
    Key("zero_optimization.reduce_bucket_size", WHOLE, auto=True, least=1),
    Key("zero_optimization.mics_shard_size", WHOLE),
    *alike("zero_optimization", TEXT, "offload_param.device offload_optimizer.device", words=_DEVICES),
    *alike("zero_optimization", BOOL, "cpu_offload cpu_offload_param cpu_offload_params ignore_unused_parameters"),
    *alike("zero_optimization.zenflow", ANY, _ZENFLOW, status=APPROXIMATED),
    near("activation_checkpointing.partition_activations", _RECOMPUTED, sets=_FULL),
    near("activation_checkpointing.cpu_checkpointing", _RECOMPUTED, sets=_FULL),
    near("activation_checkpointing.number_checkpoints", _RECOMPUTED, WHOLE, sets=_FULL),
    Key("pipeline.stages", WHOLE, auto=True, least=0),
    Key("pipeline.partition", TEXT),
    near("pipeline.activation_checkpoint_interval", "Blocks are recomputed separately, which is exact for 1.", WHOLE),
    *alike("tensor_parallel", WHOLE, "autotp_size tp.tp_size tensor_parallel.tp_size", least=0),
    Key("tensor_parallel.vocab_parallel_lm_head", BOOL),
    Key("sequence_parallel_size", WHOLE, least=0),
    Key("expert_parallel.enabled", BOOL),
    Key("expert_parallel.autoep_size", WHOLE, least=0),
    near("compile.deepcompile", "Block by block with torch.compile; collectives stay outside.", sets=_COMPILE),
    Key("compile.enabled", BOOL, sets=_COMPILE),
)

_WATCHING = (
    Key("checkpoint.writer.decoupled", BOOL, sets=_ASYNC),
    near("nebula.enabled", sets=_ASYNC),
    near("datastates_ckpt", kind=MAPPING, sets=_ASYNC),
    near("steps_per_print", "Optimizer steps between two logged rows.", WHOLE, least=1),
    near("comms_logger.enabled", "Bytes by mesh axis and collective, not times.", sets=("monitor", "communication")),
    Key("wall_clock_breakdown", BOOL, note="monitor.step_time logs time/<part>. On in monitor=default."),
    Key("memory_breakdown", BOOL, note="monitor.memory logs memory/<name>. On in monitor=default."),
    Key("timers.throughput.enabled", BOOL, note="monitor.throughput. On in monitor=default."),
    near("flops_profiler.enabled", "monitor.throughput logs flops_per_second of the module. On in monitor=default."),
    Key("csv_monitor.enabled", BOOL, note="metrics.csv in the run directory is always written."),
    Key("tensorboard.enabled", BOOL),
    *taken("tensorboard", TEXT, output_path="save_dir", job_name="name"),
    Key("wandb.enabled", BOOL),
    *taken("wandb", TEXT, project="project", team="entity", group="group"),
    Key("comet.enabled", BOOL),
    *taken("comet", TEXT, project="project", workspace="workspace", experiment_key="experiment_key"),
    Key("comet.online", BOOL, "online"),
    Key("comet.mode", TEXT, "mode"),
)

_OUT = "Remove the section from the file to train without it."
_PRUNINGS = ("sparse_pruning", "row_pruning", "head_pruning", "channel_pruning")
_TECHNIQUES = ("weight_quantization", "activation_quantization", *_PRUNINGS)
_COMPRESSED = f"Quantize and prune with a library in the module. {_OUT}"
_SAMPLES = f"The data module decides the order and length of samples. {_OUT}"
_STOPS = (
    stop("curriculum_learning.enabled", _SAMPLES),
    stop("data_efficiency.enabled", _SAMPLES),
    stop("progressive_layer_drop.enabled", f"The module decides which layers it computes. {_OUT}"),
    *(stop(f"compression_training.{name}.shared_parameters.enabled", _COMPRESSED) for name in _TECHNIQUES),
    stop("compression_training.layer_reduction.enabled", _COMPRESSED),
    stop("quantize_training.enabled", _COMPRESSED),
    stop("eigenvalue.enabled", _COMPRESSED),
    stop("weight_quantization.quantized_initialization", _COMPRESSED, MAPPING, {}),
    stop("weight_quantization.post_init_quant", _COMPRESSED, MAPPING, {}),
    stop("sparse_attention.mode", f"The model defines attention. {_OUT}", TEXT, "dense"),
    stop("elasticity.enabled", f"A run resumes with any number of ranks (launch.min_devices). {_OUT}"),
)

KEYS = {key.path: key for key in (*_TRAINING, *_PRECISION, *_LAYOUT, *_WATCHING, *_STOPS)}
# Sections whose keys have an effect only if `enabled` is true.
SWITCHED = ("fp16", "bf16", "bfloat16", "torch_autocast", "amp", "expert_parallel", "tensorboard", "wandb", "comet")


def _tree() -> Tree:
    root: Tree = {}
    for path in KEYS:
        node = root
        for part in path.split("."):
            node = node.setdefault(part, {})
    return root


# Nested names of the keys.
TREE = _tree()
