import sys
import urllib.error
import urllib.request
from typing import Any

import pytest
from lightning.pytorch import Callback

from tests.callbacks.modules import train
from trainwright import Trainer
from trainwright.callbacks.monitor.memory import Memory
from trainwright.callbacks.monitor.prometheus import Prometheus
from trainwright.callbacks.monitor.records import emit

pytest.importorskip("prometheus_client")


class Asks(Callback):
    """Scrapes the metrics at the end of training."""

    text = ""
    port = 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        emit(trainer, "step", {"seconds": {"forward": 1.5}, "steps": 2})
        emit(trainer, "event", {"what": "checkpoint", "text": "x", "seconds": 1.0})
        serving = next(each for each in trainer.callbacks if isinstance(each, Prometheus))
        assert serving.port is not None
        self.port = serving.port
        self.text = _asked(self.port)


def _asked(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_metrics_are_served_until_the_end() -> None:
    asks, serving = Asks(), Prometheus(port=0)
    train(Memory(2), serving, asks, kind=Trainer, max_steps=4, logger=False)
    lines = asks.text.splitlines()
    assert 'trainwright_step{rank="0"} 4.0' in lines
    assert 'trainwright_step_seconds_forward{rank="0"} 1.5' in lines
    assert 'trainwright_events_total{rank="0",what="checkpoint"} 1.0' in lines
    assert any(line.startswith('trainwright_memory_host{rank="0"}') for line in lines)
    assert serving.port is None
    with pytest.raises(urllib.error.URLError):
        _asked(asks.port)


def test_port_in_use() -> None:
    class Again(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            serving = next(each for each in trainer.callbacks if isinstance(each, Prometheus))
            with pytest.raises(ValueError, match="choose another port"):
                Prometheus(port=serving.port or 1).setup(trainer, pl_module, "fit")

    train(Prometheus(port=0), Again(), kind=Trainer, max_steps=1)


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=r"pip install 'trainwright\[prometheus\]'"):
        train(Prometheus(port=0), kind=Trainer, max_steps=1)
