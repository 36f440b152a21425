"""Options out of range and unsupported strategies, for every callback."""

from typing import Any

import pytest

from tests.callbacks.modules import train
from trainwright.callbacks.guard.loss_guard import LossGuard
from trainwright.callbacks.guard.replica_check import ReplicaCheck
from trainwright.callbacks.monitor.norms import Norms
from trainwright.callbacks.monitor.prometheus import Prometheus
from trainwright.callbacks.monitor.records import MonitorFile
from trainwright.callbacks.monitor.trace.profile import Profile
from trainwright.callbacks.progress.global_loss import GlobalLoss
from trainwright.callbacks.progress.progress_bar import ProgressBar
from trainwright.callbacks.progress.throughput import Throughput
from trainwright.callbacks.save.run_state import RunStateCheckpoint
from trainwright.callbacks.traffic.communication import CommunicationReport
from trainwright.callbacks.traffic.communication_advice import CommunicationAdvice
from trainwright.callbacks.traffic.stragglers import Stragglers


@pytest.mark.parametrize(("kind", "options", "message"), [
    (GlobalLoss, {"every_n_steps": 0}, "GlobalLoss: every_n_steps=0: must be a whole number of at least 1 .optimizer"),
    (Throughput, {"every_n_steps": 0}, "every_n_steps=0.*at least 1"),
    (Throughput, {"units_per_sample": 0}, "units_per_sample=0.*at least 1, or None"),
    (ProgressBar, {"line_seconds": 0}, "ProgressBar: line_seconds=0: must be a finite number above 0"),
    (CommunicationReport, {"every_n_steps": 0}, "every_n_steps=0.*at least 1"),
    (CommunicationAdvice, {"after_steps": 0}, "CommunicationAdvice: after_steps=0"),
    (Stragglers, {"every_n_steps": 0}, "every_n_steps=0"),
    (Stragglers, {"threshold": 0}, "above 0 and below 1 .a fraction of a step"),
    (Stragglers, {"threshold": 1}, "above 0 and below 1 .a fraction of a step"),
    (Stragglers, {"threshold": 1.5}, "above 0 and below 1 .a fraction of a step"),
    (MonitorFile, {"run_dir": "there", "most_ranks": 0}, "most_ranks=0: must .* at least 1, or None for all ranks"),
    (Profile, {"run_dir": "there", "most_ranks": 0}, "most_ranks=0: must .* at least 1, or None for all ranks"),
    *(
        (Profile, {"steps": steps, "run_dir": "there"}, "allowed: two whole numbers")
        for steps in ([3, 1], [1], [-1, 2], [1.5, 2], "12")
    ),
    (Prometheus, {"port": 70000}, "at least 0 and at most 65535"),
    (ReplicaCheck, {"every_n_steps": 0}, "every_n_steps=0"),
    (ReplicaCheck, {"on_difference": "x"}, "allowed: repair, stop"),
    (ReplicaCheck, {"most_repairs": -1}, "-1"),
    (LossGuard, {"policy": "x", "threshold": -1}, "policy='x': unknown; allowed: skip, rollback, stop; threshold=-1: "),
    (LossGuard, {"min_history": 200}, "min_history=200 with window=128"),
])  # fmt: skip
def test_options_out_of_range(kind: Any, options: dict[str, Any], message: str) -> None:
    pytest.importorskip("prometheus_client") if kind is Prometheus else None
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize(("callback", "message"), [
    (CommunicationReport(), "does not support the strategy SingleDeviceStrategy"),
    (Norms(), "Norms does not support the strategy SingleDeviceStrategy"),
    (RunStateCheckpoint("there"), "RunStateCheckpoint does not support the strategy SingleDeviceStrategy"),
    (ReplicaCheck(), "it needs one of trainwright"),
    (LossGuard(), r"needs trainwright\.Trainer"),
    (Stragglers(), r"needs trainwright\.Trainer"),
])  # fmt: skip
def test_lightnings_strategies_and_trainer(callback: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(callback, max_steps=1, enable_checkpointing=isinstance(callback, RunStateCheckpoint))
