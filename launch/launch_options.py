"""Options of the group `launch`: who starts the ranks of a run, and what is done when they fail."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from trainwright.launch.engines.engines import kinds
from trainwright.launch.recovery.check_recovery import RECOVERIES
from trainwright.strategies.contract.options import number, word


@dataclass
class LaunchConfig:
    """`launch=local|torchrun`: who starts the ranks; those of other engines have more keys."""

    # local = this command starts them, torchrun = torchrun or srun does; else the engine, as the yaml has it.
    kind: str = word("local", "local", "torchrun", *kinds())
    # TCP port of the rendezvous on 127.0.0.1 (launch=local); null = a free one.
    port: int | None = number(None, least=1, most=65535)
    # Seconds that a rank has to end by itself after Ctrl-C, SIGTERM or the failure of another rank; then it is killed.
    grace_seconds: float = 5.0
    # CPU threads of each rank; null = OMP_NUM_THREADS when set, else cores divided by the ranks of this machine.
    threads: int | None = number(None, least=1, most=65536)
    # How often the ranks of this machine are started again after a failure, from the newest good checkpoint; 0 = off,
    # null = no limit.
    max_restarts: int | None = 0
    # A failure that comes so often in a row (the same error at the same step) ends the run.
    same_failure_limit: int = number(3, least=1)
    # Seconds before a second restart without progress; doubles each time, to 60. After progress nothing waits.
    backoff_seconds: float = 1.0
    # Fewest devices to go on with when one is lost, with the same global batch; null = always as many as devices says.
    min_devices: int | None = number(None, least=1)
    # Seconds after which a lost device is asked whether it works again (with min_devices).
    probe_seconds: float = number(60.0, above=0)
    # What is done when a rank is lost and may be replaced: restart = all ranks start anew from the newest checkpoint;
    # replicas = the other replicas go on in their processes, from copies in memory, and a new one joins them;
    # rejoin = all others go on, and the lost one is started anew and joins them (workers of parameter servers);
    # auto = what the strategy allows of rejoin and replicas, else restart.
    recovery: str = word("restart", *RECOVERIES)
    # With recovery=replicas, processes that stand ready to take a lost one's place at once; 0 = one is started then.
    spares: int = 0
    # Hours between two failures of the job that are expected: with recovery=replicas, copies in memory are made as
    # often as loses least time then, by Young's and Daly's formula from what a copy costs.
    mtbf: float = number(3.0, above=0)
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
    cluster: str = word("slurm", "slurm", "local")
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
    cpus_per_task: int | None = number(None, least=1)
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
    signal_seconds: int | None = number(None, least=1)
    # Jobs of --multirun, which are one array, that run at once; null = as many as there is room for.
    array_parallelism: int | None = number(None, least=1)
    # Show the logs until the job ends, and cancel it with Ctrl-C; false = end once it is submitted.
    wait: bool = True
    # Seconds between two questions to SLURM for the state of the job.
    poll_seconds: float = number(5.0, least=0.1)


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
    placement: str = word("PACK", "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
    # Seconds to wait for room in the cluster; then the run goes on with fewer devices (launch.min_devices), or ends.
    placement_seconds: float = number(300.0, above=0)
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
    start_timeout: float = number(1800.0, least=1)
    # Kind of the training runtime: ClusterTrainingRuntime or TrainingRuntime.
    runtime_kind: str = word("ClusterTrainingRuntime", "ClusterTrainingRuntime", "TrainingRuntime")
    # Its name.
    runtime: str = "torch-distributed"
    # With submit=true, what Ctrl-C does: delete the job, or leave it running.
    on_interrupt: str = word("delete", "delete", "leave")
    # Seconds between two looks at the job.
    poll_seconds: float = number(2.0, least=0.1)
