"""Choices and keys of earlier versions that were removed, with their replacements."""

from trainwright.strategies.averaging.compression import options as compression_options

_OF_THE_RUNTIME = (
    "was removed: it is a setting of a TrainJob's training runtime; leave it out, and set it in the runtime that "
    "launch.runtime=... names"
)

REMOVED_CHOICES = {
    "launch=multinode": (
        "was removed; start torchrun on each host, with the same TRAINWRIGHT_RUN_TOKEN exported on all: torchrun "
        "--nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=<first host>:29400 -m trainwright fit ... "
        "nodes=2 devices=8, or type launch=slurm, launch=ray or launch=kubernetes (docs/launching.md)"
    ),
    **{f"compression={name}": text for name, text in compression_options.REMOVED.items()},
}
"""Override -> the rest of the sentence."""

REMOVED_KEYS = {
    "launch.job": (
        "was removed: every job is a TrainJob of Kubeflow Trainer; leave it out, and install Kubeflow Trainer 2.2 or "
        "later in clusters that have the Training Operator (pytorchjob) or JobSet alone"
    ),
    "launch.min_nodes": (
        "was removed: a TrainJob has no elastic policy; leave it out, and let the training runtime restart pods that "
        "fail"
    ),
    "launch.rdzv_port": "was removed: Kubeflow Trainer chooses the port of the rendezvous; leave it out",
    "launch.backoff_limit": _OF_THE_RUNTIME,
    "launch.image_pull_policy": _OF_THE_RUNTIME,
    "launch.restart_policy": _OF_THE_RUNTIME,
    "launch.ttl_seconds": _OF_THE_RUNTIME,
}
"""Key -> the rest of the sentence."""
