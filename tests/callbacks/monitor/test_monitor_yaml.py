import pytest
from hydra.utils import instantiate
from lightning.pytorch import Callback

from trainwright import compose
from trainwright.callbacks.certificate import CertificateRecord
from trainwright.callbacks.monitor.bubble import Bubble
from trainwright.callbacks.monitor.events import Events
from trainwright.callbacks.monitor.goodput import Goodput
from trainwright.callbacks.monitor.memory import Memory
from trainwright.callbacks.monitor.norms import Norms
from trainwright.callbacks.monitor.records import MonitorFile
from trainwright.callbacks.monitor.scale import LossScale
from trainwright.callbacks.monitor.step_time import StepTime
from trainwright.callbacks.monitor.trace.profile import Profile
from trainwright.callbacks.progress.global_loss import GlobalLoss
from trainwright.callbacks.progress.plan_check import PlanCheck
from trainwright.callbacks.progress.progress_bar import ProgressBar
from trainwright.callbacks.progress.run_summary import RunSummary
from trainwright.callbacks.progress.start_summary import StartSummary
from trainwright.callbacks.progress.throughput import Throughput
from trainwright.core.problems import ConfigError


def test_default_is_cheap() -> None:
    made = [instantiate(node) for node in compose(recipe="digits", overrides=["run_dir=null"]).monitor.values()]
    assert all(isinstance(callback, Callback) for callback in made)
    of_steps = {Throughput, StepTime, Memory, LossScale, Profile, Bubble, Goodput, PlanCheck}
    told = {StartSummary, GlobalLoss, ProgressBar, Events, CertificateRecord, RunSummary, MonitorFile}
    assert {type(callback) for callback in made} == of_steps | told
    assert isinstance(made[-1], MonitorFile)
    assert not any(getattr(callback, "needs_collective_steps", False) for callback in made), (
        "ranks may step by themselves"
    )


def test_profile_steps() -> None:
    node = compose(recipe="digits", overrides=["monitor.profile=[10,20]", "run_dir=there"]).monitor.profile
    made = instantiate(node)
    assert isinstance(made, Profile)
    assert (made.steps, made.run_dir) == ((10, 20), "there")
    with pytest.raises(ConfigError, match=r"monitor.profile=\[20, 10\] \(allowed: two whole numbers"):
        compose(recipe="digits", overrides=["monitor.profile=[20,10]"])


def test_norms_are_opt_in() -> None:
    for choice, has in (("default", False), ("norms", True), ("thorough", True)):
        nodes = compose(recipe="digits", overrides=[f"monitor={choice}", "run_dir=null"]).monitor
        assert ("norms" in nodes) == has
    assert type(instantiate(nodes["norms"])) is Norms
    assert dict(compose(recipe="digits", overrides=["monitor=none"]).monitor) == {}
