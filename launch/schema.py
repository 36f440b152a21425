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
from trainwright.launch.auto_options import AutoOptions
from trainwright.launch.deepspeed_options import DeepSpeedJSONOptions
from trainwright.strategies.contract.options import number
from trainwright.strategies.contract.registry import all_options, options_of_others
from trainwright.strategies.data.zero_options import ZeroOptions

SCHEMA_NAME = "_schema"


PRECISIONS = ("32", "bf16-mixed", "bf16-true", "16-mixed")
ACCELERATORS = ("auto", "cpu", "gpu")
PARTITIONS = ("interleave", "range", "hash")


@dataclass
class AccumulationConfig:
    """`accumulation=auto|fixed`: micro-batches per optimizer step."""

    # Micro-batches per optimizer step; null = follows from global_batch_size (1 when that is null too).
    steps: int | None = None


@dataclass
class FixedAccumulationConfig(AccumulationConfig):
    """`accumulation=fixed`: the number is asked for."""

    # Micro-batches per optimizer step; 1 = no accumulation.
    steps: int | None = MISSING


@dataclass
class BalanceConfig:
    """`balance=none|auto|fixed`: who computes how much of the global batch, which itself stays what it is."""

    # none = all data ranks the same, auto = by measured speed, fixed = by shares.
    kind: str = "none"
    # Parts of the data ranks in any unit, like [3,1] (kind=fixed); null = none.
    shares: list[float] | None = None
    # Optimizer steps that are measured before shares are decided upon anew (kind=auto).
    every_steps: int = 20
    # Weight of what was measured before, below 1 (kind=auto); 0 = off.
    smoothing: float = 0.5
    # Part of an equal share that a rank keeps at least (kind=auto).
    least_share: float = 0.1
    # Times an equal share that a rank gets at most: so many times micro_batch_size samples it must be able to hold at
    # once (kind=auto).
    most_share: float = 2.0
    # Part of the time of a step below which a gain is not worth other shares (kind=auto).
    least_gain: float = 0.05


@dataclass
class CompressionConfig:
    """`compression=none|fp16|bf16`: how gradients are sent between replicas."""

    # none, fp16, bf16, int8, topk, powersgd or onebit.
    name: str = "none"


@dataclass
class Int8CompressionConfig(CompressionConfig):
    """`compression=int8`: a byte a number."""

    name: str = "int8"
    # Numbers that share a scale.
    block: int = 256


@dataclass
class TopKCompressionConfig(CompressionConfig):
    """`compression=topk`: the largest numbers and their places."""

    name: str = "topk"
    # Part of the numbers that is sent; 1 = all.
    ratio: float = 0.01
    # How they are written: fp32, fp16, bf16 or int8.
    values: str = "fp32"
    # What is compressed: gradients, or steps of Adam after the warm-up; auto = steps where there are any.
    sends: str = "auto"
    # Optimizer steps at the beginning in which gradients are averaged as they are; 0 = off.
    warmup_steps: int = 100


@dataclass
class PowerSGDCompressionConfig(CompressionConfig):
    """`compression=powersgd`: two thin factors of each matrix."""

    name: str = "powersgd"
    # Columns of the factors.
    rank: int = 4
    # Steps of subspace iteration for each average, each of which sends both factors.
    iterations: int = 2
    # Tensors that would not become shorter by this factor are sent as they are.
    least_gain: float = 2.0
    # How factors are written: fp32, fp16 or bf16.
    values: str = "bf16"
    # What is compressed: gradients, or steps of Adam after the warm-up; auto = steps where there are any.
    sends: str = "auto"
    # Optimizer steps at the beginning in which gradients are averaged as they are; 0 = off.
    warmup_steps: int = 100


@dataclass
class OneBitCompressionConfig(CompressionConfig):
    """`compression=onebit`: the signs of Adam's momentum."""

    name: str = "onebit"
    # Numbers that share a scale, a multiple of 8.
    block: int = 2048
    # Optimizer steps in which gradients are averaged as they are, while Adam's variance is learned.
    warmup_steps: int = 100


@dataclass
class LaunchConfig:
    """`launch=local|torchrun`: who starts the ranks; those of other engines have more keys."""

    # local = this command starts them, torchrun = torchrun or srun does; else the engine, as the yaml has it.
    kind: str = "local"
    # TCP port of the rendezvous on 127.0.0.1 (launch=local); null = a free one.
    port: int | None = None
    # Seconds that a rank has to end by itself after Ctrl-C, SIGTERM or the failure of another rank; then it is killed.
    grace_seconds: float = 5.0
    # CPU threads of each rank; null = OMP_NUM_THREADS when set, else cores divided by the ranks of this machine.
    threads: int | None = number(None, least=1, most=65536)
    # How often the ranks of this machine are started again after a failure, from the newest good checkpoint; 0 = off,
    # null = no limit.
    max_restarts: int | None = 0
    # A failure that comes so often in a row (the same error at the same step) ends the run.
    same_failure_limit: int = 3
    # Seconds before a second restart without progress; doubles each time, to 60. After progress nothing waits.
    backoff_seconds: float = 1.0
    # Fewest devices to go on with when one is lost, with the same global batch; null = always as many as devices says.
    min_devices: int | None = None
    # Seconds after which a lost device is asked whether it works again (with min_devices).
    probe_seconds: float = 60.0
    # What is done when a rank is lost and may be replaced: restart = all ranks start anew from the newest checkpoint;
    # replicas = the other replicas go on in their processes, from copies in memory, and a new one joins them;
    # rejoin = all others go on, and the lost one is started anew and joins them (workers of parameter servers);
    # auto = what the strategy allows of rejoin and replicas, else restart.
    recovery: str = "restart"
    # With recovery=replicas, processes that stand ready to take a lost one's place at once; 0 = one is started then.
    spares: int = 0
    # Hours between two failures of the job that are expected: with recovery=replicas, copies in memory are made as
    # often as loses least time then, by Young's and Daly's formula from what a copy costs.
    mtbf: float = 3.0
    # Seconds without progress after which the rank to blame is killed, with a report: auto = learned for each phase of
    # a step from how long it took before, a number = the same for all, null = off. A run on one device is watched
    # where a number is given.
    hang_timeout: Any = "auto"
    # How much longer than ever before a phase may take (hang_timeout=auto).
    hang_safety_factor: float = 5.0
    # Least seconds that a phase may take (hang_timeout=auto).
    hang_floor_seconds: float = 30.0
    # Seconds that a phase may take of which nothing is known yet: setup, the first steps, the first validation, the
    # first checkpoint (hang_timeout=auto).
    hang_first_timeout: float = 1800.0


@dataclass
class SlurmLaunchConfig(LaunchConfig):
    """`launch=slurm`: one SLURM job of this run, with one task on each machine, which starts its ranks."""

    kind: str = "slurm"
    # slurm, or local = processes of this machine that submitit takes for a job, to try it without SLURM.
    cluster: str = "slurm"
    # Partition of the job; null = the default of the cluster, as with all of these.
    partition: str | None = None
    # Longest time of the job: minutes, or as sbatch takes it (1-12:00:00); null = that of the partition.
    time: str | None = None
    # Account that pays.
    account: str | None = None
    # Quality of service.
    qos: str | None = None
    # Features that machines must have.
    constraint: str | None = None
    # Share machines with no other job; false = off.
    exclusive: bool = False
    # GPUs of each machine; null = devices where accelerator=gpu, else none is asked for.
    gpus_per_node: int | None = None
    # CPU cores of each machine (of its one task).
    cpus_per_task: int | None = None
    # Memory of each machine, GiB.
    mem_gb: float | None = None
    # Container of the tasks, for clusters with Pyxis or the like; null = none.
    container_image: str | None = None
    # What the container sees of the file system, like [/data:/data]; [] = what the cluster has set.
    container_mounts: list[str] = field(default_factory=list)
    # Python of the tasks, as a shell takes it; null = that of this command.
    python: str | None = None
    # Lines of the batch script before the tasks start, like [module load cuda]; [] = none.
    setup: list[str] = field(default_factory=list)
    # Other options of sbatch, like {reservation: mine, mail-type: END}; {} = none.
    sbatch: dict[str, Any] = field(default_factory=dict)
    # Other options of srun, like [--mpi=none]; [] = none.
    srun: list[str] = field(default_factory=list)
    # Seconds before the end of the time at which the ranks are told by preemption.signals; null =
    # preemption.deadline_seconds and 10 more.
    signal_seconds: int | None = None
    # Jobs of --multirun, which are one array, that run at once; null = as many as there is room for.
    array_parallelism: int | None = None
    # Show the logs until the job ends, and cancel it with Ctrl-C; false = end once it is submitted.
    wait: bool = True
    # Seconds between two questions to SLURM for the state of the job.
    poll_seconds: float = 5.0


@dataclass
class RayLaunchConfig(LaunchConfig):
    """`launch=ray`: an actor of Ray for each rank."""

    kind: str = "ray"
    # local = a cluster of this machine for this run, auto = the one that this machine belongs to, or ray://host:port or
    # host:port.
    address: str = "local"
    # CPU cores of each rank.
    cpus_per_rank: float = 1.0
    # GPUs of each rank; null = 1 where accelerator=gpu, else none.
    gpus_per_rank: float | None = None
    # Memory of each rank, GiB; null = it is not counted.
    memory_gb_per_rank: float | None = None
    # Other resources of each rank, as the cluster names them, like {fast_network: 1}; {} = none.
    resources: dict[str, float] = field(default_factory=dict)
    # What single ranks need in place of that: rank -> cpus, gpus, memory_gb and names of other resources, like
    # {3: {cpus: 8, gpus: 0}}; {} = all the same.
    ranks: dict[int, Any] = field(default_factory=dict)
    # Where groups of ranks (nodes of them, devices in each) go: PACK (few machines), SPREAD, STRICT_PACK (one machine)
    # or STRICT_SPREAD (each another one).
    placement: str = "PACK"
    # Seconds to wait for room in the cluster; then the run goes on with fewer devices (launch.min_devices), or ends.
    placement_seconds: float = 300.0
    # Environment of the actors, as ray.init takes it; {} = as it is, for clusters of one machine or whose machines see
    # the same files.
    runtime_env: dict[str, Any] = field(default_factory=dict)


@dataclass
class KubernetesLaunchConfig(LaunchConfig):
    """`launch=kubernetes`: a job of pods, one for each machine; each has an agent of torchrun."""

    kind: str = "kubernetes"
    # Image of the containers, with this version of trainwright and your own code in it.
    image: str | None = MISSING
    # Claim of the volume (ReadWriteMany on several nodes) that the run directory lies on.
    claim: str | None = MISSING
    # Where the pods mount that volume, and work: a relative run_dir lies under it.
    mount: str = "/workspace"
    # Send the job to the cluster and show what its pods say; false = write kubernetes.yaml into the run directory.
    submit: bool = False
    # Context of the kubeconfig; null = the current one.
    context: str | None = None
    # Namespace; null = that of the context (submit=true), or of kubectl.
    namespace: str | None = None
    # Name of the job; null = made of the names of run and run directory.
    job_name: str | None = None
    # GPUs of each pod; null = as many as devices with accelerator=gpu, else none.
    gpus: int | None = None
    # Name of the resource that they are.
    gpu_resource: str = "nvidia.com/gpu"
    # CPUs of each pod, like 16 or 500m; null = not said.
    cpu: str | None = None
    # Memory of each pod, like 64Gi; null = not said.
    memory: str | None = None
    # Shared memory of each pod (/dev/shm), like 16Gi; null = what the cluster gives, 64 MiB.
    shm: str | None = "8Gi"
    # More resources of each pod, like {rdma/ib: 1}; {} = none.
    resources: dict[str, Any] = field(default_factory=dict)
    # More volumes: claim -> path, like {data: /data}; {} = none.
    volumes: dict[str, str] = field(default_factory=dict)
    # Variables of the pods; they stand in the manifest, so no secrets.
    env: dict[str, str] = field(default_factory=dict)
    # Variables from secrets of the cluster: variable -> secret/key, like {WANDB_API_KEY: wandb/key}; {} = none.
    secret_env: dict[str, str] = field(default_factory=dict)
    # Labels of job and pods, like {kueue.x-k8s.io/queue-name: team}; {} = none.
    labels: dict[str, str] = field(default_factory=dict)
    # Annotations of the pods; {} = none.
    annotations: dict[str, str] = field(default_factory=dict)
    # Labels that nodes must have; {} = any node.
    node_selector: dict[str, str] = field(default_factory=dict)
    # Tolerations, as in a manifest: [{key: gpu, operator: Exists, effect: NoSchedule}]; [] = none.
    tolerations: list[dict[str, str]] = field(default_factory=list)
    # Service account of the pods; null = the namespace's own.
    service_account: str | None = None
    # Secrets to fetch the image with; [] = none.
    image_pull_secrets: list[str] = field(default_factory=list)
    # Python in the image.
    python: str = "python"
    # Seconds that pods wait for the first one, images are fetched meanwhile.
    start_timeout: float = 1800.0
    # Kind of the training runtime: ClusterTrainingRuntime or TrainingRuntime.
    runtime_kind: str = "ClusterTrainingRuntime"
    # Its name.
    runtime: str = "torch-distributed"
    # With submit=true, what Ctrl-C does: delete the job, or leave it running.
    on_interrupt: str = "delete"
    # Seconds between two looks at the job.
    poll_seconds: float = 2.0


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
class LossScaleConfig:
    """`trainer.loss_scale`: how the loss is scaled with precision=16-mixed."""

    # Scale of the first steps.
    initial: float = 65536.0
    # Optimizer steps in a row without overflow after which the scale doubles.
    growth_interval: int = 2000
    # The scale never falls below this; 0 = no limit.
    least: float = 0.0
    # Never change the scale; false = it halves after an overflow and grows again.
    fixed: bool = False


@dataclass
class TrainerConfig:
    """`trainer=default|debug|overfit`: everything else that the Trainer takes."""

    # Largest norm (or absolute value, see gradient_clip_algorithm) of the gradients; null = no clipping.
    gradient_clip_val: float | None = None
    # How to clip: norm or value; null = norm.
    gradient_clip_algorithm: str | None = None
    # With precision=16-mixed: initial, growth_interval, least and fixed of the loss scale.
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
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
    data_partition: str = "interleave"
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
    # auto (GPUs when there are any), cpu or gpu.
    accelerator: str = "auto"
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
    precision: str = "32"
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
    balance: BalanceConfig = field(default_factory=BalanceConfig)
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
    choices = {"zero": ZeroOptions, "auto": AutoOptions, "deepspeed_json": DeepSpeedJSONOptions, **built_in}
    for name, node in choices.items():
        store.store(group="strategy", name=f"_{name}", node=node)
    store.store(group="accumulation", name="_auto", node=AccumulationConfig)
    store.store(group="accumulation", name="_fixed", node=FixedAccumulationConfig)
    store.store(group="balance", name="_balance", node=BalanceConfig)
    store.store(group="compression", name="_none", node=CompressionConfig)
    store.store(group="compression", name="_int8", node=Int8CompressionConfig)
    store.store(group="compression", name="_topk", node=TopKCompressionConfig)
    store.store(group="compression", name="_powersgd", node=PowerSGDCompressionConfig)
    store.store(group="compression", name="_onebit", node=OneBitCompressionConfig)
    store.store(group="launch", name="_launch", node=LaunchConfig)
    store.store(group="launch", name="_slurm", node=SlurmLaunchConfig)
    store.store(group="launch", name="_ray", node=RayLaunchConfig)
    store.store(group="launch", name="_kubernetes", node=KubernetesLaunchConfig)
    store.store(group="preemption", name="_preemption", node=PreemptionConfig)
    store.store(group="trainer", name="_trainer", node=TrainerConfig)
    store.store(group="device", name="_device", node=DeviceConfig)
