"""Options of the group `launch`: which launcher starts the ranks, and recovery after a failure."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from trainwright.core.config.options import number, word
from trainwright.launch.engines.engines import kinds
from trainwright.launch.recovery.check_recovery import RECOVERIES


@dataclass
class LaunchConfig:
    """`launch=local|torchrun`: which launcher starts the ranks; the engines add keys of their own."""

    # local = this command starts the ranks, torchrun = torchrun or srun does, else the engine that the yaml sets.
    kind: str = word("local", "local", "torchrun", *kinds())
    # TCP port of the rendezvous on 127.0.0.1 (launch=local); null = any free port.
    port: int | None = number(None, least=1, most=65535)
    # Seconds a rank has to exit after Ctrl-C, SIGTERM or the failure of another rank before it is killed.
    grace_seconds: float = 5.0
    # CPU threads per rank; null = OMP_NUM_THREADS if set, else the cores of this machine divided by its ranks.
    threads: int | None = number(None, least=1, most=65536)
    # Restarts of this machine's ranks after a failure, each from the newest good checkpoint; 0 = off, null = no limit.
    max_restarts: int | None = 0
    # End the run when the same failure (same error at the same step) occurs this many times in a row.
    same_failure_limit: int = number(3, least=1)
    # Seconds before a second restart without progress; doubles each time, up to 60. No wait after progress.
    backoff_seconds: float = 1.0
    # Fewest devices to continue with after losing one, at the same global batch; null = always the number in devices.
    min_devices: int | None = number(None, least=1)
    # Seconds between probes of a lost device (with min_devices).
    probe_seconds: float = number(60.0, above=0)
    # Recovery when a rank is lost: restart = restart all ranks from the newest checkpoint; replicas = the other
    # replicas continue in their processes from in-memory snapshots, and a new one joins them; rejoin = the other ranks
    # continue, and the lost one is restarted and rejoins (workers of parameter servers); auto = rejoin or replicas
    # where the strategy allows it, else restart.
    recovery: str = word("restart", *RECOVERIES)
    # Standby processes that replace a lost rank at once, with recovery=replicas; 0 = start one when it is needed.
    spares: int = 0
    # Expected hours between failures of the job. With recovery=replicas it sets the interval of in-memory snapshots, by
    # the Young/Daly formula and the measured cost of a snapshot.
    mtbf: float = number(3.0, above=0)
    # Seconds without progress after which the rank at fault is killed and a report written: auto = learned per phase of
    # a step, a number = the same for all phases, null = off. A run on one device is watched only where a number is set.
    hang_timeout: Any = number("auto", "auto", above=0, unit="seconds", null="for off")
    # How many times longer than its longest duration so far a phase may take (hang_timeout=auto).
    hang_safety_factor: float = number(5.0, least=1, unit="below 1, what took long once would be a hang the next time")
    # Lower bound of the time limit of a phase, in seconds (hang_timeout=auto).
    hang_floor_seconds: float = number(30.0, above=0)
    # Time limit, in seconds, of phases without history: setup, the first steps, the first validation, the first
    # checkpoint (hang_timeout=auto).
    hang_first_timeout: float = number(1800.0, above=0)


@dataclass
class SlurmLaunchConfig(LaunchConfig):
    """`launch=slurm`: one SLURM job per run, with one task per machine that starts its ranks."""

    kind: str = "slurm"
    # slurm, or local = run submitit's local processes, to try it without SLURM.
    cluster: str = word("slurm", "slurm", "local")
    # Partition of the job; null = the default of the cluster, as for every key below.
    partition: str | None = None
    # Time limit of the job: minutes, or as sbatch takes it (1-12:00:00); null = that of the partition.
    time: str | None = None
    # Account that is charged.
    account: str | None = None
    # Quality of service.
    qos: str | None = None
    # Features required of the machines.
    constraint: str | None = None
    # Do not share the machines with other jobs; false = off.
    exclusive: bool = False
    # GPUs per machine; null = devices with accelerator=gpu, else none requested.
    gpus_per_node: int | None = None
    # CPU cores per machine (for its one task).
    cpus_per_task: int | None = number(None, least=1)
    # Memory per machine, in GiB.
    mem_gb: float | None = None
    # Container image of the tasks, on clusters with Pyxis or similar; null = none.
    container_image: str | None = None
    # Mounts of the container, like [/data:/data]; [] = the cluster's default.
    container_mounts: list[str] = field(default_factory=list)
    # Python of the tasks, as a shell command; null = that of this command.
    python: str | None = None
    # Lines of the batch script to run before the tasks, like [module load cuda]; [] = none.
    setup: list[str] = field(default_factory=list)
    # Other options of sbatch, like {reservation: mine, mail-type: END}; {} = none.
    sbatch: dict[str, Any] = field(default_factory=dict)
    # Other options of srun, like [--mpi=none]; [] = none.
    srun: list[str] = field(default_factory=list)
    # Seconds before the time limit at which preemption.signals are sent to the ranks; null =
    # preemption.deadline_seconds + 10.
    signal_seconds: int | None = number(None, least=1)
    # Jobs of --multirun (one job array) that run at once; null = as many as there is room for.
    array_parallelism: int | None = number(None, least=1)
    # Follow the logs until the job ends, and cancel it on Ctrl-C; false = exit after submitting.
    wait: bool = True
    # Seconds between queries of the job state.
    poll_seconds: float = number(5.0, least=0.1)


@dataclass
class RayLaunchConfig(LaunchConfig):
    """`launch=ray`: one Ray actor per rank."""

    kind: str = "ray"
    # local = start a cluster on this machine for this run, auto = the cluster this machine belongs to, or
    # ray://host:port or host:port.
    address: str = "local"
    # CPU cores per rank.
    cpus_per_rank: float = 1.0
    # GPUs per rank; null = 1 with accelerator=gpu, else none.
    gpus_per_rank: float | None = None
    # Memory per rank, in GiB; null = not requested.
    memory_gb_per_rank: float | None = None
    # Custom resources per rank, by the cluster's names, like {fast_network: 1}; {} = none.
    resources: dict[str, float] = field(default_factory=dict)
    # Resources of single ranks instead of the above: rank -> cpus, gpus, memory_gb and custom resources, like
    # {3: {cpus: 8, gpus: 0}}; {} = the same for all.
    ranks: dict[int, Any] = field(default_factory=dict)
    # Placement of groups of ranks (nodes groups of devices ranks): PACK (few machines), SPREAD, STRICT_PACK (one
    # machine) or STRICT_SPREAD (a separate machine each).
    placement: str = word("PACK", "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
    # Seconds to wait for resources; then the run continues on fewer devices (launch.min_devices), or ends.
    placement_seconds: float = number(300.0, above=0)
    # Runtime environment of the actors, as ray.init takes it; {} = unchanged, for one machine or machines that share
    # their files.
    runtime_env: dict[str, Any] = field(default_factory=dict)


@dataclass
class KubernetesLaunchConfig(LaunchConfig):
    """`launch=kubernetes`: one Job with a pod per machine, each running a torchrun agent."""

    kind: str = "kubernetes"
    # Container image, with this version of trainwright and your code.
    image: str | None = MISSING
    # Persistent volume claim that holds the run directory (ReadWriteMany on several nodes).
    claim: str | None = MISSING
    # Mount path of that volume and working directory of the pods; a relative run_dir is below it.
    mount: str = "/workspace"
    # Submit the job and follow its logs; false = write kubernetes.yaml into the run directory.
    submit: bool = False
    # Context of the kubeconfig; null = the current one.
    context: str | None = None
    # Namespace; null = that of the context (submit=true), or kubectl's.
    namespace: str | None = None
    # Name of the job; null = from the names of the run and its directory.
    job_name: str | None = None
    # GPUs per pod; null = devices with accelerator=gpu, else none.
    gpus: int | None = None
    # Resource name of the GPUs.
    gpu_resource: str = "nvidia.com/gpu"
    # CPUs per pod, like 16 or 500m; null = not set.
    cpu: str | None = None
    # Memory per pod, like 64Gi; null = not set.
    memory: str | None = None
    # Shared memory per pod (/dev/shm), like 16Gi; null = the cluster's default, 64 MiB.
    shm: str | None = "8Gi"
    # Other resources per pod, like {rdma/ib: 1}; {} = none.
    resources: dict[str, Any] = field(default_factory=dict)
    # Other volumes: claim -> mount path, like {data: /data}; {} = none.
    volumes: dict[str, str] = field(default_factory=dict)
    # Environment variables of the pods; they are readable in the manifest, so put no secrets here.
    env: dict[str, str] = field(default_factory=dict)
    # Environment variables from secrets: variable -> secret/key, like {WANDB_API_KEY: wandb/key}; {} = none.
    secret_env: dict[str, str] = field(default_factory=dict)
    # Labels of the job and its pods, like {kueue.x-k8s.io/queue-name: team}; {} = none.
    labels: dict[str, str] = field(default_factory=dict)
    # Annotations of the pods; {} = none.
    annotations: dict[str, str] = field(default_factory=dict)
    # Node selector (labels that nodes must have); {} = any node.
    node_selector: dict[str, str] = field(default_factory=dict)
    # Tolerations, as in a manifest: [{key: gpu, operator: Exists, effect: NoSchedule}]; [] = none.
    tolerations: list[dict[str, str]] = field(default_factory=list)
    # Service account of the pods; null = the default of the namespace.
    service_account: str | None = None
    # Secrets for pulling the image; [] = none.
    image_pull_secrets: list[str] = field(default_factory=list)
    # Python executable in the image.
    python: str = "python"
    # Seconds that pods wait for the first one, image pulls included.
    start_timeout: float = number(1800.0, least=1)
    # Kind of the training runtime: ClusterTrainingRuntime or TrainingRuntime.
    runtime_kind: str = word("ClusterTrainingRuntime", "ClusterTrainingRuntime", "TrainingRuntime")
    # Name of the training runtime.
    runtime: str = "torch-distributed"
    # On Ctrl-C with submit=true: delete the job, or leave it running.
    on_interrupt: str = word("delete", "delete", "leave")
    # Seconds between queries of the job state.
    poll_seconds: float = number(2.0, least=0.1)
