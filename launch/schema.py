"""The typed configuration of a run: every key, its type, its unit and the value that means "off".

These dataclasses are the schema that Hydra composes onto: a key that is not here is refused, and so is a value of the
wrong type. The comment lines above a field are what `trainwright fit --help` prints for it. Free-form parts, where a
recipe or a user's own class decides which keys exist, are `module`, `data`, `optimizer` and the mappings of callbacks
and loggers.

Neither torch nor Lightning is imported here: the launching process reads this module and must start fast.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from trainwright.core.problems import ConfigError
from trainwright.launch.auto_options import AutoOptions, DeepSpeedJSONOptions
from trainwright.launch.launch_options import (
    KubernetesLaunchConfig,
    LaunchConfig,
    RayLaunchConfig,
    SlurmLaunchConfig,
)
from trainwright.strategies.averaging.compression.options import CONFIGS, CompressionConfig
from trainwright.strategies.contract.options import number, word
from trainwright.strategies.contract.registry import all_options, options_of_others
from trainwright.strategies.data.zero_options import ZeroOptions
from trainwright.trainer.balance.options import BalanceOptions
from trainwright.trainer.loop.loss_scale import LossScaling

SCHEMA_NAME = "_schema"


@dataclass
class AccumulationConfig:
    """`accumulation=auto|fixed`: micro-batches per optimizer step."""

    # Micro-batches per optimizer step; null = follows from global_batch_size (1 when that is null too).
    steps: int | None = number(None, least=1)


@dataclass
class FixedAccumulationConfig(AccumulationConfig):
    """`accumulation=fixed`: the number is asked for."""

    # Micro-batches per optimizer step; 1 = no accumulation.
    steps: int | None = number(MISSING, least=1)


@dataclass
class PreemptionConfig:
    """`preemption=default|none`: what a run does that is told to end."""

    _target_: str = "trainwright.callbacks.end.preemption.Preemption"
    # Save the run state before the end, with the callback of the group checkpoint; false = off.
    save: bool = True
    # Signals that end the run: SIGTERM, SIGUSR1, SIGUSR2; [] = none.
    signals: list[str] = field(default_factory=lambda: ["SIGTERM", "SIGUSR1"])
    # A path: once it exists, the run ends; null = off.
    file: str | None = None
    # An address to ask, such as that of a cloud's metadata: an answer of status 200 that is neither empty nor FALSE nor
    # NONE ends the run; null = off.
    url: str | None = None
    # Headers that the address asks for, like {Metadata-Flavor: Google}; {} = none.
    url_headers: dict[str, str] = field(default_factory=dict)
    # Seconds between two looks at file and url.
    poll_seconds: float = 5.0
    # Seconds from the notice until the process is gone, saved or not; null = as long as it takes.
    deadline_seconds: float | None = 120.0
    # Exit code; null = 128 plus the number of the signal (143 for SIGTERM, file and url).
    exit_code: int | None = number(None, most=255)
    # Under SLURM, run scontrol requeue for this job after the save; false = off.
    requeue: bool = False
    # About how often the ranks ask each other whether one was told to end, in seconds.
    check_seconds: float = 1.0


@dataclass
class TrainerConfig:
    """`trainer=default|debug|overfit`: everything else that the Trainer takes."""

    # Largest norm (or absolute value, see gradient_clip_algorithm) of the gradients; null = no clipping.
    gradient_clip_val: float | None = None
    # How to clip: norm or value; null = norm.
    gradient_clip_algorithm: str | None = word(None, "norm", "value")
    # With precision=16-mixed: initial, growth_interval, least and fixed of the loss scale.
    loss_scale: LossScaling = field(default_factory=LossScaling)
    # Stop with an error when the norm of the gradients is infinite or NaN; false = off.
    error_if_nonfinite: bool = False
    # Validate after this many training batches (whole number) or this share of an epoch (0.0 to 1.0).
    val_check_interval: int | float | None = None
    # Validate every so many epochs; null = count batches across epochs (with a whole val_check_interval).
    check_val_every_n_epoch: int | None = number(1, least=1)
    # Validation batches before training starts, to find errors early; 0 = off, -1 = all.
    num_sanity_val_steps: int | None = number(0, least=-1)
    # Batches (whole number) or share of them (0.0 to 1.0) used per epoch; null = all.
    limit_train_batches: int | float | None = None
    # The same for validation.
    limit_val_batches: int | float | None = None
    # The same for test.
    limit_test_batches: int | float | None = None
    # The same for predict.
    limit_predict_batches: int | float | None = None
    # Train and validate on this many batches (or share of them) over and over; 0.0 = off.
    overfit_batches: int | float = 0.0
    # Run this many batches of everything once, without logging or checkpoints; false = off, true = 1.
    fast_dev_run: bool | int = False
    # Fewest epochs to train; null = no minimum.
    min_epochs: int | None = None
    # Fewest optimizer steps to train; null = no minimum.
    min_steps: int | None = None
    # Longest training time as DD:HH:MM:SS; null = no limit.
    max_time: str | None = None
    # Optimizer steps between two logged rows.
    log_every_n_steps: int = 10
    # Only deterministic algorithms: true, false, or warn (where there is one).
    deterministic: bool | str | None = None
    # Let cuDNN time its algorithms and take the fastest; null = Lightning decides.
    benchmark: bool | None = None
    # Find the operation that made a NaN (slow); false = off.
    detect_anomaly: bool = False
    # Lightning profiler: simple, advanced, pytorch; null = off.
    profiler: str | None = None
    # Print Lightning's table of layers at the start.
    enable_model_summary: bool = False
    # Make the data loaders again every so many epochs; 0 = never.
    reload_dataloaders_every_n_epochs: int = 0
    # Cut the samples over the data ranks; false = the data module does it itself.
    use_distributed_sampler: bool = True
    # Wrap evaluation in torch.inference_mode; false = torch.no_grad.
    inference_mode: bool = True
    # BatchNorm statistics over all ranks; false = each rank its own.
    sync_batchnorm: bool = False
    # What weighs the same in an optimizer step: every micro-batch (micro_batch) or every valid token (tokens: the loss
    # is the mean over all tokens of the global batch, whatever the layout).
    loss_weighting: str = "micro_batch"
    # With loss_weighting=tokens: function from a batch to its number of valid tokens, as package.module:function;
    # null = the targets of the one cross_entropy or nll_loss in training_step that are not ignore_index.
    token_count: str | None = None
    # Seed of the order of the training samples; null = the seed of the run.
    data_seed: int | None = number(None, most=2**32 - 1)
    # Which data rank reads which sample: interleave (in turn), range (a contiguous part each) or hash (by data_key, so
    # that a sample keeps its rank when ranks come and go).
    data_partition: str = word("interleave", "interleave", "range", "hash")
    # Let the last micro-batches of a step be smaller where global_batch_size is no multiple of those of all data ranks;
    # false = refuse such a global batch.
    uneven_steps: bool = False
    # With data_partition=hash: function from data set and index to what the sample is known by, as
    # package.module:function; null = the index.
    data_key: str | None = None
    # Go on from a checkpoint whose global batch, data set, seed or partition of the data was another; false = refuse.
    allow_changed_data: bool = False
    # Draw every sample under random numbers seeded by the seed, the epoch and its index, so that augmentations do not
    # depend on the layout; false = off.
    seed_samples: bool = False


@dataclass
class LinkConfig:
    """What one device sends to another."""

    # Seconds of one message of a ring, without its bytes.
    latency: float | None = None
    # Bytes per second that one device sends, in one direction.
    bandwidth: float | None = None
    # Seconds of one collective beside its messages; null = they are in latency.
    call: float | None = None


@dataclass
class DeviceConfig:
    """`device=auto|h100|...`: the device that plans are made for (docs/planning.md) and `mfu` is held against."""

    # auto = what this machine has: as trainwright profile has measured it in this folder, or published figures.
    name: str = MISSING
    # Memory of one device, bytes.
    memory_bytes: int | None = None
    # Most floating-point operations per second with dense matrices: float32, tf32, bfloat16, float16.
    flops: dict[str, float] = field(default_factory=dict)
    # Bytes per second of the device's own memory.
    memory_bandwidth: float | None = None
    # Part of flops that the matrix products of a training step reach.
    efficiency: float | None = None
    # Devices of a node, which within connects.
    devices_per_node: int | None = None
    # Between two devices of a node.
    within: LinkConfig = field(default_factory=LinkConfig)
    # Between nodes, for each device.
    across: LinkConfig = field(default_factory=LinkConfig)
    # Bytes per second between a device and the memory of its host, in one direction.
    host_bandwidth: float | None = None
    # Memory of the host for each device, bytes.
    host_memory_bytes: int | None = None
    # Seconds that starting an operation of torch takes, whatever its size; null = not counted.
    operation_seconds: float | None = None
    # Seconds that gathering a block's parameters or reducing its gradients takes beside the collective; null = not
    # counted.
    gather_seconds: float | None = None
    # Part of a core that each rank had, where more ranks than cores were measured; null = 1, a device for each.
    share: float | None = None
    # What trainwright profile has measured: the name of the GPU, or the number of cores; null = published or assumed.
    measured_on: str | None = None
    # Where the profile is from, which device=auto tells; null = from its name.
    source: str | None = None


@dataclass
class RunConfig:
    """One run, whole. A recipe fills `name`, `module` and `data`; groups fill the rest; plain keys are set by hand."""

    # Name of the run: its directories lie under runs/<name>/. The recipe sets it.
    name: str = MISSING
    # Processes per machine, one per GPU or CPU share; auto = all GPUs, or 1 on a machine without one.
    devices: int | str = number(1, least=1, most=4096)
    # Number of machines.
    nodes: int = number(1, least=1, most=65536)
    # auto (GPUs when there are any), cpu, gpu (CUDA), or mps (Apple's, with strategy=single).
    accelerator: str = word("auto", "auto", "cpu", "gpu", "mps")
    # Seed of everything random: initial weights, order of samples, dropout.
    seed: int = number(0, most=2**32 - 1)
    # Optimizer steps to train; null = no limit.
    max_steps: int | None = None
    # Passes over the training data; null = no limit.
    max_epochs: int | None = None
    # Samples per optimizer step over all ranks; accumulation follows from it. null = what micro-batch, accumulation and
    # ranks make together.
    global_batch_size: int | None = number(None, least=1)
    # Samples that one rank processes at once; auto = as many as fit (docs/planning.md), null = the data module decides.
    micro_batch_size: int | str | None = number(None, least=1)
    # Directory of the run; null = runs/<name>/<date>_<time>.
    run_dir: str | None = None
    # Write report.html into the run directory when fit ends; false = off.
    report: bool = True
    # Checkpoint to go on from: a path, or last (the newest good one of run_dir, or of this recipe); null = start
    # afresh.
    ckpt_path: str | None = None
    # auto = go on from the newest good checkpoint of run_dir (or of this recipe) when there is one, else start afresh;
    # null = as ckpt_path says.
    resume: str | None = None
    # Let the file named by ckpt_path run code when it is a pickle; false = off, nothing that is loaded runs code.
    trust: bool = False
    # Names and shapes of what ckpt_path or init_from holds must be those of the module; false = leave out what does not
    # fit.
    strict: bool = True
    # Weights to begin from, nothing else: a .safetensors file, a folder of them, or a checkpoint; null = the module's.
    init_from: str | None = None
    # Numeric precision, set by the group: 32, bf16-mixed, bf16-true, 16-mixed.
    precision: str = word("32", "32", "bf16-mixed", "bf16-true", "16-mixed")
    # The LightningModule: _target_ and its arguments. Set by the recipe.
    module: dict[str, Any] = field(default_factory=dict)
    # The LightningDataModule: _target_ and its arguments; {} = the module brings its own data loaders.
    data: dict[str, Any] = field(default_factory=dict)
    # Functions that look at the configuration before a process starts, as package.module:function. Set by the recipe.
    checks: list[str] = field(default_factory=list)
    # Lightning callbacks of the recipe: name -> _target_ and arguments; {} = none.
    callbacks: dict[str, Any] = field(default_factory=dict)
    # Faults to inject on purpose, as sentences like kill(rank=1, at_step=7), see docs/fault_injection.md; [] = none.
    inject: list[str] = field(default_factory=list)
    # DeepSpeed JSON that the configuration was made from, for the record: strategy=deepspeed_json sets it; null = none.
    deepspeed_json: str | None = None
    # Folders that ckpt_path=last and resume=auto look through, decided by the command; [] = neither was asked for.
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
    # Set by the group of the same name: the device that plans are made for.
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
    "device": {"device": DeviceConfig},
}
"""Types that the choices of a group are built on, by name."""


def register_schema() -> None:
    """Make the dataclasses known to Hydra; doing it twice changes nothing.

    Names begin with an underscore because they are types to build on, not choices to make: `strategy=_zero` is not
    offered anywhere. A strategy of another package is a choice without a yaml, too: its options are all that there is.

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
        return  # Hydra would make its nodes from the dataclasses once more
    store.store(name=SCHEMA_NAME, node=RunConfig)
    built_in = {name: options for name, options in all_options() if name not in others}
    strategies = {"zero": ZeroOptions, "auto": AutoOptions, "deepspeed_json": DeepSpeedJSONOptions, **built_in}
    for group, types in {**TYPES, "strategy": strategies}.items():
        for name, node in types.items():
            store.store(group=group, name=f"_{name}", node=node)
