"""Authenticity of the configuration that rank 0 sends: 25 attempts to replace it."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from trainwright.core.problems import ConfigError
from trainwright.core.run.launcher import Launcher
from trainwright.core.text.messages import RUN_TOKEN, run_token, seal
from trainwright.launch.engines.torchrun import agreement

HOSTILE = "module:\n  _target_: os.system\n"
SECRET = "0123456789abcdef" * 2


class Store:
    """Store like torch's: any client may set any key."""

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
def as_rank(request: Any, monkeypatch: Any, tmp_path: Path) -> Callable[[], None]:
    """Makes this process a rank as it was started: with the secret, or without one."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(RUN_TOKEN, "")

    def start() -> None:
        os.environ[RUN_TOKEN] = request.param

    start()
    return start


def test_it_arrives_and_nothing_is_left(as_rank: Callable[[], None], tmp_path: Path) -> None:
    store = Store()
    agreement.give(store, "a: 1\n")
    secret = run_token()
    for _ in range(2):
        as_rank()
        assert agreement.take(store, 2) == "a: 1\n"
        assert run_token() == secret != ""
    assert list(tmp_path.iterdir()) == []
    agreement.give(store, None)
    assert agreement.take(store, 2) is None


def planted(folder: Path, mode: int = 0o600, secret: str = SECRET) -> Path:
    place = folder / f"trainwright-secret-{mode:o}{secret}"
    place.write_text(secret)
    place.chmod(mode)
    return place


def test_no_other_takes_its_place(as_rank: Callable[[], None], tmp_path: Path) -> None:
    sealed = seal(SECRET, HOSTILE)
    link = tmp_path / "link"
    link.symlink_to(planted(tmp_path))
    attempts: list[str | bytes] = [
        HOSTILE, json.dumps({"config": HOSTILE}), sealed, b"", b"\xff" * 100, b"[" * 100_000, sealed + b"\xff",
        seal("", HOSTILE) + bytes(planted(tmp_path, secret="")), seal("abc", HOSTILE) + b"/dev/null",
        *(sealed + bytes(planted(tmp_path, mode)) for mode in (0o666, 0o620, 0o602)),
        sealed + bytes(link), sealed + bytes(tmp_path), sealed + b"/proc/self/environ",
    ]  # fmt: skip
    if os.geteuid() == 0:
        foreign = planted(tmp_path, 0o400)
        os.chown(foreign, 12345, -1)
        attempts.append(sealed + bytes(foreign))
    for attempt in attempts:
        store = Store()
        agreement.give(store, "a: 1\n")
        as_rank()
        store.set(agreement._KEY, attempt)
        with pytest.raises(ConfigError, match="not from this run's rank 0"):
            agreement.take(store, 2)


def test_a_file_that_others_name_is_not_removed(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv(RUN_TOKEN, SECRET)
    store, kept = Store(), planted(tmp_path)
    agreement.give(store, "a: 1\n")
    store.set(agreement._KEY, store.get(agreement._KEY) + bytes(kept))
    assert agreement.take(store, 1) == "a: 1\n"
    assert kept.exists()


def test_several_machines_need_a_secret(monkeypatch: Any) -> None:
    store, launcher = Store(), Launcher("torchrun", 0, 4, 2)
    monkeypatch.setattr("trainwright.launch.ranks.torchrun_store.meet", lambda launcher: store)
    monkeypatch.setattr(agreement, "_wait_for_readers", lambda *_: None)
    monkeypatch.delenv(RUN_TOKEN, raising=False)
    with pytest.raises(ConfigError, match=f"export {RUN_TOKEN}="):
        agreement.agree(launcher, lambda _: OmegaConf.create({"run_dir": "x"}))
    assert agreement.agree(replace(launcher, rank=3), lambda _: OmegaConf.create()) is None
    monkeypatch.setenv(RUN_TOKEN, "shared")
    agreement.agree(launcher, lambda _: OmegaConf.create({"run_dir": "x"}))
    assert agreement.agree(replace(launcher, rank=3), lambda _: OmegaConf.create()) == {"run_dir": "x"}
