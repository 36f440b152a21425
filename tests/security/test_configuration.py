"""The configuration that ranks hear of from rank 0 is rank 0's: 25 attempts to put another in its place."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from trainwright.checkpoint.messages import RUN_TOKEN, seal
from trainwright.trainer.launch import external, handed_over
from trainwright.trainer.launch.launcher import Launcher
from trainwright.trainer.problems import ConfigError

HOSTILE = "module:\n  _target_: os.system\n"


class Store:
    """As torch's: whoever reaches it may set any key."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.numbers: dict[str, int] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self.numbers[key] = self.numbers.get(key, 0) + amount
        return self.numbers[key]


@pytest.fixture(params=["", "a secret of the run"], ids=["file", "token"])
def token(request: Any, monkeypatch: Any, tmp_path: Path) -> str:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(RUN_TOKEN, request.param)
    return str(request.param)


def test_it_arrives_and_nothing_is_left(token: str, tmp_path: Path) -> None:
    store = Store()
    handed_over.give(store, "a: 1\n")
    assert [handed_over.take(store, 2), handed_over.take(store, 2)] == ["a: 1\n"] * 2
    assert list(tmp_path.iterdir()) == []
    handed_over.give(store, None)
    assert handed_over.take(store, 2) is None


def planted(folder: Path, mode: int = 0o600, name: str = "trainwright-configuration-x") -> Path:
    place = folder / name
    place.mkdir()
    (place / "config.yaml").write_text(HOSTILE)
    (place / "config.yaml").chmod(mode)
    return place


def test_no_other_takes_its_place(token: str, tmp_path: Path) -> None:
    links = tmp_path / "trainwright-configuration-links"
    links.mkdir()
    (links / "config.yaml").symlink_to(planted(tmp_path) / "config.yaml")
    opened = planted(tmp_path, name="trainwright-configuration-open")
    opened.chmod(0o777)
    attempts: list[str | bytes] = [
        HOSTILE, json.dumps({"config": HOSTILE}), seal("another", HOSTILE), b"", b"\xff" * 100, b"[" * 100_000,
        str(planted(tmp_path, name="elsewhere")), str(planted(tmp_path, 0o666, "trainwright-configuration-y")),
        str(links), str(opened), "/dev", "/proc/self",
    ]  # fmt: skip
    if not token and os.geteuid() == 0:
        foreign = planted(tmp_path, name="trainwright-configuration-foreign")
        os.chown(foreign / "config.yaml", 12345, -1)
        attempts.append(str(foreign))
    for attempt in attempts:
        store = Store()
        handed_over.give(store, "a: 1\n")
        store.set(handed_over._KEY, attempt)
        with pytest.raises(ConfigError, match="not the one of this run's rank 0"):
            handed_over.take(store, 2)


def test_several_machines_need_a_secret(monkeypatch: Any) -> None:
    store, launcher = Store(), Launcher("torchrun", 0, 4, 2)
    monkeypatch.setattr(external, "_meet", lambda launcher: store)
    monkeypatch.setattr(external, "_wait_for_readers", lambda *_: None)
    monkeypatch.delenv(RUN_TOKEN, raising=False)
    with pytest.raises(ConfigError, match=f"export {RUN_TOKEN}="):
        external.agree(launcher, lambda _: OmegaConf.create({"run_dir": "x"}))
    assert external.agree(replace(launcher, rank=3), lambda _: OmegaConf.create()) is None
    monkeypatch.setenv(RUN_TOKEN, "shared")
    external.agree(launcher, lambda _: OmegaConf.create({"run_dir": "x"}))
    assert external.agree(replace(launcher, rank=3), lambda _: OmegaConf.create()) == {"run_dir": "x"}
