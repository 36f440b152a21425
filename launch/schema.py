"""The typed configuration of a run: every key, its type, its unit and the value that means "off".

Hydra composes onto these dataclasses: unknown keys and values of the wrong type are refused. The comment lines above a
field are its help text in `trainwright fit --help`. Free-form parts, whose keys a recipe or a user's class decides, are
`module`, `data`, `optimizer` and the mappings of callbacks and loggers.

This module imports neither torch nor Lightning, because the launching process reads it and must start fast.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from trainwright.callbacks.end.options import PreemptionOptions
from trainwright.callbacks.schedule.schedules import RunSchedule
from trainwright.core.config.options import number, word
from trainwright.core.problems import ConfigError
from trainwright.launch.auto_options import AutoOptions, DeepSpeedJSONOptions
from trainwright.launch.launch_options import KubernetesLaunchConfig, LaunchConfig, RayLaunchConfig, SlurmLaunchConfig
from trainwright.strategies.averaging.compression.options import CONFIGS, CompressionConfig
from trainwright.strategies.contract.registry import all_options, options_of_others
from trainwright.strategies.data.options import ZeroOptions
from trainwright.trainer.balance.options import BalanceOptions
from trainwright.trainer.loop.loss_scale import LossScaling

SCHEMA_NAME = "_schema"


@dataclass
class AccumulationConfig:
    """`accumulation=auto|fixed`: micro-batches per optimizer step."""

    # Micro-batches per optimizer step; null = derived from global_batch_size (1 if that is null too).
    steps: int | None = number(None, least=1)


@dataclass
class FixedAccumulationConfig(AccumulationConfig):
    """`accumulation=fixed`: a given number of micro-batches."""

    # Micro-batches per optimizer step; 1 = no accumulation.
    steps: int | None = number(MISSING, least=1)


@dataclass
class PreemptionConfig(PreemptionOptions):
    """`preemption=default|none`: how a run ends when it is interrupted."""

    _target_: str = "trainwright.callbacks.end.preemption.Preemption"


@dataclass
class TrainerConfig:
    """`trainer=default|debug|overfit`: all other arguments of the Trainer."""

    # Maximum gradient norm (or absolute value, see gradient_clip_algorithm); null = no clipping.
    gradient_clip_val: float | None = None
    # Clipping algorithm: norm or value; null = norm.
    gradient_clip_algorithm: str | None = word(None, "norm", "value")
    # Loss scale with precision=16-mixed: initial, growth_interval, least and fixed.
    loss_scale: LossScaling = field(default_factory=LossScaling)
    # Stop with an error when the gradient norm is infinite or NaN; false = off.
    error_if_nonfinite: bool = False
    # Validate after this many training batches (integer) or this fraction of an epoch (0.0 to 1.0).
    val_check_interval: int | float | None = None
    # Validate every n epochs; null = count batches across epochs (with an integer val_check_interval).
    check_val_every_n_epoch: int | None = number(1, least=1)
    # Validation batches to run before training, to find errors early; 0 = off, -1 = all.
    num_sanity_val_steps: int | None = number(0, least=-1)
    # Training batches per epoch (integer) or fraction of them (0.0 to 1.0); null = all.
    limit_train_batches: int | float | None = None
    # The same for validation.
    limit_val_batches: int | float | None = None
    # The same for test.
    limit_test_batches: int | float | None = None
    # The same for predict.
    limit_predict_batches: int | float | None = None
    # Train and validate on this many batches (or fraction of them) repeatedly; 0.0 = off.
    overfit_batches: int | float = 0.0
    # Run this many batches of each loop once, without logging or checkpoints; false = off, true = 1.
    fast_dev_run: bool | int = False
    # Minimum number of epochs; null = none.
    min_epochs: int | None = None
    # Minimum number of optimizer steps; null = none.
    min_steps: int | None = None
    # Maximum training time as DD:HH:MM:SS; null = no limit.
    max_time: str | None = None
    # Optimizer steps between logged rows.
    log_every_n_steps: int = 10
    # Use deterministic algorithms only: true, false, or warn (where one exists).
    deterministic: bool | str | None = None
    # Let cuDNN benchmark its algorithms and use the fastest; null = Lightning's default.
    benchmark: bool | None = None
    # Find the operation that produced a NaN (slow); false = off.
    detect_anomaly: bool = False
    # Lightning profiler: simple, advanced, pytorch; null = off.
    profiler: str | None = None
    # Print Lightning's model summary at the start.
    enable_model_summary: bool = False
    # Recreate the data loaders every n epochs; 0 = never.
    reload_dataloaders_every_n_epochs: int = 0
    # Shard the samples over the data-parallel ranks; false = the data module does so itself.
    use_distributed_sampler: bool = True
    # Evaluate in torch.inference_mode; false = torch.no_grad.
    inference_mode: bool = True
    # Compute BatchNorm statistics over all ranks; false = per rank.
    sync_batchnorm: bool = False
    # What is weighted equally in an optimizer step: every micro-batch (micro_batch) or every valid token (tokens: the
    # loss is the mean over all tokens of the global batch, whatever the layout).
    loss_weighting: str = word("micro_batch", "micro_batch", "tokens")
    # With loss_weighting=tokens: function from a batch to its number of valid tokens, as package.module:function;
    # null = count the targets other than ignore_index of the single cross_entropy or nll_loss in training_step.
    token_count: str | None = None
    # Seed of the order of training samples; null = the run's seed.
    data_seed: int | None = number(None, most=2**32 - 1)
    # How samples are partitioned over data-parallel ranks: interleave (round-robin), range (contiguous ranges) or hash
    # (by data_key, so that a sample keeps its rank when the number of ranks changes).
    data_partition: str = word("interleave", "interleave", "range", "hash")
    # Allow smaller last micro-batches of a step where global_batch_size is not a multiple of the micro-batches of all
    # data-parallel ranks; false = refuse such a global batch.
    uneven_steps: bool = False
    # With data_partition=hash: function from data set and index to the key of a sample, as package.module:function;
    # null = the index.
    data_key: str | None = None
    # Resume from a checkpoint with another global batch, data set, seed or data partition; false = refuse.
    allow_changed_data: bool = False
    # Load every sample under random numbers seeded by seed, epoch and index, so that augmentations do not depend on the
    # layout; false = off.
    seed_samples: bool = False


@dataclass
class LinkConfig:
    """Communication between two devices."""

    # Latency of one message of a ring, in seconds.
    latency: float | None = None
    # Bandwidth of one device in one direction, in bytes per second.
    bandwidth: float | None = None
    # Overhead of one collective call in seconds; null = included in latency.
    call: float | None = None


@dataclass
class DeviceConfig:
    """`device=auto|h100|...`: the device that plans (docs/planning.md) and `mfu` refer to."""

    # auto = this machine, as measured by trainwright profile in this folder, or else from published figures.
    name: str = MISSING
    # Memory of one device, in bytes.
    memory_bytes: int | None = None
    # Peak FLOP/s with dense matrices: float32, tf32, bfloat16, float16.
    flops: dict[str, float] = field(default_factory=dict)
    # Memory bandwidth of the device, in bytes per second.
    memory_bandwidth: float | None = None
    # Fraction of flops that the matrix products of a training step reach.
    efficiency: float | None = None
    # Devices per node, connected as in within.
    devices_per_node: int | None = None
    # Links between devices of one node.
    within: LinkConfig = field(default_factory=LinkConfig)
    # Links between nodes, per device.
    across: LinkConfig = field(default_factory=LinkConfig)
    # Bandwidth between device and host memory in one direction, in bytes per second.
    host_bandwidth: float | None = None
    # Host memory per device, in bytes.
    host_memory_bytes: int | None = None
    # Overhead of launching one torch operation, in seconds; null = not counted.
    operation_seconds: float | None = None
    # Overhead, beside the collective, of gathering a block's parameters or reducing its gradients, in seconds; null =
    # not counted.
    gather_seconds: float | None = None
    # Fraction of a core per rank, where more ranks than cores were measured; null = 1.
    share: float | None = None
    # Hardware measured by trainwright profile: the name of the GPU, or the number of cores; null = published or
    # assumed.
    measured_on: str | None = None
    # Origin of the profile, reported by device=auto; null = derived from its name.
    source: str | None = None


@dataclass
class RunConfig:
    """The whole configuration of a run. A recipe sets `name`, `module` and `data`; groups set the rest; plain keys are
    set by hand.
    """

    # Name of the run; its directories are runs/<name>/... Set by the recipe.
    name: str = MISSING
    # Processes per machine, one per GPU or CPU share; auto = all GPUs, or 1 without GPUs.
    devices: int | str = number(1, "auto", least=1, most=4096)
    # Number of machines.
    nodes: int = number(1, least=1, most=65536)
    # auto (GPUs if there are any), cpu, gpu (CUDA), or mps (Apple's, with strategy=single).
    accelerator: str = word("auto", "auto", "cpu", "gpu", "mps")
    # Seed of all random numbers: initial weights, sample order, dropout.
    seed: int = number(0, most=2**32 - 1)
    # Optimizer steps to train; null = no limit.
    max_steps: int | None = None
    # Epochs to train; null = no limit.
    max_epochs: int | None = None
    # Samples per optimizer step over all ranks; accumulation is derived from it. null = micro-batch x accumulation x
    # data-parallel ranks.
    global_batch_size: int | None = number(None, least=1)
    # Samples per rank and micro-batch; auto = as many as fit (docs/planning.md), null = decided by the data module.
    micro_batch_size: int | str | None = number(None, "auto", least=1)
    # Run directory; null = runs/<name>/<date>_<time>.
    run_dir: str | None = None
    # Write report.html into the run directory when fit ends; false = off.
    report: bool = True
    # Checkpoint to resume from or evaluate: a path, last (the newest good one of run_dir, or of this recipe), best (by
    # its monitored value), or initial (evaluate the module's own weights); null = none, in evaluation best or last.
    ckpt_path: str | None = None
    # auto = resume from the newest good checkpoint of run_dir (or of this recipe) if there is one, else start from
    # scratch; null = as ckpt_path says.
    resume: str | None = None
    # Allow the file named by ckpt_path to run code if it is a pickle; false = off, no loaded file runs code.
    trust: bool = False
    # Require the names and shapes in ckpt_path or init_from to match the module; false = skip what does not match.
    strict: bool = True
    # Weights to start from, without any other state: a .safetensors file, a folder of them, or a checkpoint; null = the
    # module's own.
    init_from: str | None = None
    # Numeric precision, set by the group: 32, bf16-mixed, bf16-true, 16-mixed.
    precision: str = word("32", "32", "bf16-mixed", "bf16-true", "16-mixed")
    # The LightningModule: _target_ and its arguments. Set by the recipe.
    module: dict[str, Any] = field(default_factory=dict)
    # The LightningDataModule: _target_ and its arguments; {} = the module has its own data loaders.
    data: dict[str, Any] = field(default_factory=dict)
    # Functions that check the configuration before any process starts, as package.module:function. Set by the recipe.
    checks: list[str] = field(default_factory=list)
    # Lightning callbacks of the recipe: name -> _target_ and arguments; {} = none.
    callbacks: dict[str, Any] = field(default_factory=dict)
    # Faults to inject, like kill(rank=1, at_step=7), see docs/fault_injection.md; [] = none.
    inject: list[str] = field(default_factory=list)
    # DeepSpeed JSON that the configuration was made from, for the record; set by strategy=deepspeed_json; null = none.
    deepspeed_json: str | None = None
    # Folders searched by ckpt_path=last and resume=auto; set by the command; [] = neither is used.
    resume_folders: list[str] = field(default_factory=list)
    # Set by the groups of the same name.
    strategy: Any = MISSING
    accumulation: Any = MISSING
    balance: BalanceOptions = field(default_factory=BalanceOptions)
    compression: Any = field(default_factory=CompressionConfig)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    monitor: dict[str, Any] = field(default_factory=dict)
    guard: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: Any = MISSING
    # Set by the group of the same name: the learning rate of each step.
    schedule: RunSchedule = field(default_factory=RunSchedule)
    # Set by the group of the same name: the device that plans refer to.
    device: DeviceConfig = field(default_factory=lambda: DeviceConfig(name="auto"))


TYPES: dict[str, dict[str, type]] = {
    "accumulation": {"auto": AccumulationConfig, "fixed": FixedAccumulationConfig},
    "balance": {"balance": BalanceOptions},
    "compression": CONFIGS,
    "launch": {
        "launch": LaunchConfig,
        "slurm": SlurmLaunchConfig,
        "ray": RayLaunchConfig,
        "kubernetes": KubernetesLaunchConfig,
    },
    "preemption": {"preemption": PreemptionConfig},
    "trainer": {"trainer": TrainerConfig},
    "schedule": {"schedule": RunSchedule},
    "device": {"device": DeviceConfig},
}
"""Types that the choices of a group are based on, by name."""


def register_schema() -> None:
    """Register the dataclasses with Hydra; a second call changes nothing.

    Names start with an underscore because they are base types, not choices: `strategy=_zero` is never offered. A
    strategy of another package is a choice without a yaml: its options are complete.

    Raises:
        ConfigError: if another package's strategy cannot be loaded.
    """
    store = ConfigStore.instance()
    try:
        others = options_of_others()
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    for name, options in others.items():
        if f"{name}.yaml" not in store.repo.get("strategy", {}):
            store.store(group="strategy", name=f"_{name}", node=options)
            store.store(group="strategy", name=name, node=options)
    if f"{SCHEMA_NAME}.yaml" in store.repo:
        return  # Hydra would create its nodes from the dataclasses again
    store.store(name=SCHEMA_NAME, node=RunConfig)
    built_in = {name: options for name, options in all_options() if name not in others}
    strategies = {"zero": ZeroOptions, "auto": AutoOptions, "deepspeed_json": DeepSpeedJSONOptions, **built_in}
    for group, types in {**TYPES, "strategy": strategies}.items():
        for name, node in types.items():
            store.store(group=group, name=f"_{name}", node=node)
