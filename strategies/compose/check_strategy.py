"""The strategy and its layout against ranks, the batch, the module, and what stands beside them."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.targets import class_of
from trainwright.core.global_batch import solve_accumulation
from trainwright.strategies.compose.rules import (
    averaging_problem,
    cuts_module,
    length_problems,
    micro_batches_for,
    optimizer_problem,
    sync_batchnorm_problem,
    validate_hybrid,
)
from trainwright.strategies.compose.world import (
    Surroundings,
    closed_layout,
    has_world_size,
    is_hybrid,
    layout_of,
    num_data_ranks,
    training_ranks,
    world_size_of,
)

# Lightning's; their subclasses are refused by the ranks.
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")


def layout_problems(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """The sizes of the axes against the number of ranks."""
    if not has_world_size(cfg):
        return []  # refused as numbers
    world_size = world_size_of(cfg, surroundings)
    if str(cfg.strategy.get("_target_", "")).endswith("SingleDeviceStrategy"):
        if world_size == 1:
            return []
        return [
            f"strategy=single trains on one device, but devices={cfg.devices} nodes={cfg.nodes} make {world_size}; "
            "type devices=1, or strategy=ddp (or zero1, zero2, zero3)"
        ]
    try:
        layout = layout_of(cfg.strategy)
        if layout is not None:
            layout.resolve(training_ranks(cfg, world_size))
    except ValueError as error:
        return [str(error)]
    return []


def batch_problems(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """The samples of a step against the ranks that share them."""
    if cfg.global_batch_size is None:
        return []
    if cfg.accumulation.steps is not None:
        return [
            f"global_batch_size={cfg.global_batch_size} and accumulation.steps={cfg.accumulation.steps}: each decides "
            "the other; leave one out (accumulation=auto, or global_batch_size=null)"
        ]
    if cfg.micro_batch_size is None or min(cfg.micro_batch_size, cfg.global_batch_size) < 1:
        return []
    if not has_world_size(cfg) or layout_problems(cfg, surroundings):
        return []  # without a layout there is no number of data ranks to divide by
    ranks = num_data_ranks(cfg, world_size_of(cfg, surroundings))
    try:
        solve_accumulation(cfg.global_batch_size, cfg.micro_batch_size, ranks, uneven=cfg.trainer.uneven_steps)
    except ValueError as error:
        return [str(error)]
    return []


def option_problems(cfg: DictConfig, _: Surroundings) -> list[str]:
    """Options of strategies that contradict each other."""
    strategy, problems = cfg.strategy, []
    if "_target_" not in strategy:
        problems.append("strategy: names no class; a yaml of the group strategy needs _target_: package.module.Class")
    if strategy.get("offload") == "parameters" and strategy.get("stage") != 3:
        problems.append(
            f"strategy.offload=parameters with stage {strategy.get('stage')}: only stage 3 shards parameters; type "
            "strategy=zero3, or strategy.offload=optimizer"
        )
    if strategy.get("bucket_mib") is not None and strategy.bucket_mib <= 0:
        problems.append(
            f"strategy.bucket_mib={strategy.bucket_mib}: must be above 0 (MiB); leave it out for the default"
        )
    if strategy.get("find_unused_parameters") and strategy.get("stage") == 3 and "pipeline" not in strategy:
        problems.append(
            "strategy.find_unused_parameters=true with stage 3 has no effect: only stages 1 and 2 look for them; type "
            "strategy=zero2, or leave it out"
        )
    if strategy.get("no_sync_accumulation") and strategy.get("stage") == 1:
        problems.append(
            "strategy.no_sync_accumulation=true with stage 1 has no effect: stage 1 holds whole gradients and sends "
            "once a step; leave it out, or type strategy=zero2"
        )
    mode, modules = strategy.get("activation_checkpointing", "none"), strategy.get("checkpoint_modules")
    if mode == "selective" and not modules:
        problems.append(
            "strategy.activation_checkpointing=selective: which modules? Type "
            "'strategy.checkpoint_modules=[model.layers.*.mlp]', or activation_checkpointing=full for all blocks"
        )
    if mode in ("none", "full") and modules:
        problems.append(
            f"strategy.checkpoint_modules with activation_checkpointing={mode}: is read with selective only; type "
            "strategy.activation_checkpointing=selective, or leave strategy.checkpoint_modules out"
        )
    return problems


def hybrid_problems(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """Options of a layout that is given axis by axis."""
    layout = closed_layout(cfg, surroundings)
    if layout is None or not is_hybrid(cfg.strategy):
        return []
    return validate_hybrid(layout, _options_of(cfg.strategy), "strategy.")


def pipeline_batch_problems(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """A data rank's batch against the micro-batches that a pipeline splits it into."""
    size, parts = cfg.micro_batch_size, least_micro_batch(cfg, surroundings)
    if size is None or size < 1 or size >= parts:  # less than 1 is refused as a number
        return []
    return [too_few_samples(size, parts, None if cfg.strategy.micro_batches is not None else cfg.strategy.schedule)]


def least_micro_batch(cfg: DictConfig, surroundings: Surroundings) -> int:
    """Samples that a data rank must read at a time: one for each part into which a pipeline splits them."""
    layout = closed_layout(cfg, surroundings)
    if layout is None or layout.pipeline == 1 or hybrid_problems(cfg, surroundings):
        return 1
    return micro_batches_for(cfg.strategy.schedule, cfg.strategy.micro_batches, layout.pipeline)


def too_few_samples(size: int, parts: int, default_of: str | None) -> str:
    """The problem of a pipeline that splits fewer samples than it has micro-batches.

    Args:
        size: samples that a data rank reads at a time.
        parts: micro-batches that these are split into.
        default_of: schedule whose default that is; ``None``: it was asked for.
    """
    how = "" if default_of is None else f", the default of schedule={default_of}"
    return (
        f"micro_batch_size={size} with strategy.micro_batches={parts}{how}: a pipeline splits the micro_batch_size "
        f"samples of a data rank into that many parts, so each needs a sample; type micro_batch_size={parts}"
    )


def sequence_length(cfg: DictConfig) -> int | None:
    """Positions of a sequence, where module and data have them from one `seq_len`; None elsewhere."""
    lengths = {OmegaConf.select(cfg, key) for key in ("module.seq_len", "module.config.seq_len", "data.seq_len")}
    lengths -= {None}
    length = lengths.pop() if len(lengths) == 1 else None
    return length if isinstance(length, int) and OmegaConf.select(cfg, "data.seq_len") is not None else None


def sequence_problems(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """The length of sequences against the ranks that split them."""
    layout, length = closed_layout(cfg, surroundings), sequence_length(cfg)
    if layout is None or length is None or length < 1 or not is_hybrid(cfg.strategy):
        return []
    return [
        f"data.seq_len={length}: {problem}"
        for problem in length_problems(layout, _options_of(cfg.strategy), length, "strategy.")
    ]


def cut_problems(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """What beside the strategy cannot work when ranks hold parts of the module."""
    layout = closed_layout(cfg, surroundings)
    if layout is None or not cuts_module(layout):
        return []
    problems = [
        f"callbacks.{name}: {averaging_problem(class_of(callback))}"
        for name, callback in cfg.callbacks.items()
        if isinstance(callback, DictConfig) and class_of(callback) in _AVERAGING and layout.expert > 1
    ]
    if cfg.trainer.sync_batchnorm:
        problem = sync_batchnorm_problem(layout)
        problems += [problem] if problem else []
    if isinstance(cfg.optimizer, DictConfig):
        problem = optimizer_problem(layout, class_of(cfg.optimizer))
        problems += [f"optimizer: {problem}"] if problem else []
    return problems


def model_problems(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """The layout against the module itself; imports torch, so only where the module is cut."""
    layout = closed_layout(cfg, surroundings)
    if layout is None or not is_hybrid(cfg.strategy) or not cuts_module(layout) or "_target_" not in cfg.module:
        return []
    from trainwright.strategies.compose.check_layout import problems_of_model

    return problems_of_model(cfg, layout, with_options=not hybrid_problems(cfg, surroundings))


def _options_of(strategy: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(strategy)
    return dict(plain)
