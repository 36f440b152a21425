import pytest
from hydra.utils import instantiate
from lightning.pytorch import Callback

from trainwright import compose
from trainwright.callbacks.monitor.norms import Norms
from trainwright.callbacks.monitor.trace.profile import Profile
from trainwright.core.problems import ConfigError


def test_default_is_cheap() -> None:
    made = [instantiate(node) for node in compose(recipe="digits", overrides=["run_dir=null"]).monitor.values()]
    assert all(isinstance(callback, Callback) for callback in made)
    of_steps = "Throughput StepTime Memory LossScale Profile Bubble Goodput PlanCheck"
    told = "StartSummary GlobalLoss ProgressBar Events CertificateRecord RunSummary MonitorFile"
    assert {type(callback).__name__ for callback in made} == set(f"{of_steps} {told}".split())
    assert type(made[-1]).__name__ == "MonitorFile"
    # Ranks may step by themselves.
    assert not any(getattr(callback, "needs_collective_steps", False) for callback in made)


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
