"""Starting ranks, and all ways in which they end."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.command.project import command, environment
from tests.warm import WarmPopen, warm_run
from trainwright.core.errors import CheckpointError
from trainwright.core.failures.error_text import stands_alone
from trainwright.core.failures.failure import Failure, FailureRecorder, first_failure
from trainwright.core.global_batch import solve_accumulation
from trainwright.core.problems import ConfigError
from trainwright.core.processes.scratch import remove_abandoned
from trainwright.core.run.launcher import Launcher, detect_launcher
from trainwright.launch.engines.torchrun.agreement import agree

WORDS = ("recipe=mine", "strategy=ddp", "devices=2", "monitor=none", "logger=csv")


# ---- which rank is to blame ------------------------------------------------------------------------------------------


def _fail(folder: Path, rank: int, error: Exception, module: str = "users_module") -> None:
    """Record an error raised by a module on a rank."""
    try:
        exec("raise error", {"__name__": module, "error": error})
    except Exception as raised:
        FailureRecorder(folder, rank, folder).record(raised)


def test_first_cause_with_user_frames(tmp_path: Path) -> None:
    _fail(tmp_path, 0, RuntimeError("Connection closed by peer"), "torch.distributed.distributed_c10d")
    _fail(tmp_path, 1, ValueError("boom"))
    _fail(tmp_path, 2, RuntimeError("later"))
    error = first_failure(tmp_path, {0: 1, 1: 1, 2: 1}, tmp_path)
    assert error.rank == 1
    head, *frames, last = str(error).splitlines()
    assert head == "rank 1 of 3 failed with ValueError: boom; the others were ended"
    assert last == f"(its traceback is in {tmp_path / 'logs/rank_1.log'})"
    assert [line.split(", line")[0] for line in frames[::2]] == [f'  File "{__file__}"']
    for rank, kind in enumerate(("RuntimeError: Connection", "ValueError: boom", "RuntimeError: later")):
        log = (tmp_path / f"logs/rank_{rank}.log").read_text()
        assert log.startswith("traceback| Traceback (most recent call last):\n")
        assert f"traceback| {kind}" in log


@pytest.mark.parametrize(("code", "how"), [(0, "exit code 0 before the others"), (1, "exit code 1 without an error")])
def test_an_early_exit_is_the_cause_of_lost_connections(tmp_path: Path, code: int, how: str) -> None:
    _fail(tmp_path, 0, RuntimeError("Connection closed by peer"), "torch.distributed.distributed_c10d")
    error = first_failure(tmp_path, {0: 1, 1: code, 2: None}, tmp_path)
    assert str(error).startswith(f"rank 1 of 3 ended with {how}")


def _of(raiser: Callable[[], Any]) -> Failure:
    try:
        raiser()
    except Exception as error:
        return Failure.of(error, 0)
    raise AssertionError("nothing was raised")


def _raise(error: Exception) -> None:
    raise error


def test_refusals_and_secondary_errors() -> None:
    refused = _of(lambda: solve_accumulation(7, 2, 2, False))
    assert refused.is_refusal
    assert refused.place.startswith(f"{__file__}:")
    bug = _of(lambda: exec("int('x')", {"__name__": "trainwright.trainer.trainer"}))
    users = _of(lambda: _raise(ValueError("no peer in the store")))
    assert not bug.is_refusal
    assert not users.is_refusal
    assert not users.is_secondary
    assert not _of(lambda: _raise(RuntimeError("the socket of my data base timed out"))).is_secondary
    assert not _of(lambda: Path("the/peer/store").read_text()).is_refusal


def test_independent_errors() -> None:
    def alone(raiser: Callable[[], Any]) -> bool:
        with pytest.raises(Exception) as raised:  # noqa: PT011 - of any kind
            raiser()
        return stands_alone(raised.value)

    def after_another() -> None:
        try:
            _raise(RuntimeError("closed"))
        except RuntimeError:
            raise ValueError("a gather failed") from None

    assert alone(lambda: _raise(RuntimeError("boom")))
    assert not alone(after_another)
    assert not alone(lambda: torch.zeros(2).view(3))  # compiled code, as when a connection breaks
    assert not alone(lambda: torch.distributed.init_process_group("no backend"))


def test_self_explanatory_error(tmp_path: Path) -> None:
    _fail(tmp_path, 1, CheckpointError("the checkpoint x is damaged"))
    text = str(first_failure(tmp_path, {0: -15, 1: 1}, tmp_path))
    log = tmp_path / "logs/rank_1.log"
    head, last = text.splitlines()
    assert head == "the checkpoint x is damaged"
    assert last.startswith(f"(said by rank 1 of 2 at {__file__}:")
    assert last.endswith(f"; its traceback is in {log})")


def test_killed_rank_is_the_cause(tmp_path: Path) -> None:
    _fail(tmp_path, 0, RuntimeError("[gloo] Connection closed by peer"), "torch.distributed")
    error = first_failure(tmp_path, {0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM}, tmp_path)
    assert "rank 1 of 3 was ended by SIGKILL" in str(error)
    assert "memory" in str(error)


def test_error_precedes_abort(tmp_path: Path) -> None:
    _fail(tmp_path, 0, ValueError("boom"))
    assert first_failure(tmp_path, {0: 1, 1: -signal.SIGABRT}, tmp_path).rank == 0


def test_log_of_a_silent_rank(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank_1.log").write_text("".join(f"line {number}\n" for number in range(100)))
    text = str(first_failure(tmp_path, {0: -15, 1: -signal.SIGSEGV}, tmp_path))
    assert "line 99" in text
    assert "line 79" not in text


def test_recorded_errors(tmp_path: Path) -> None:
    recorder = FailureRecorder(tmp_path, 0)
    recorder.record(KeyboardInterrupt())
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(SystemExit) as ended:  # as Lightning answers Ctrl-C
            sys.exit(1)
    recorder.record(ended.value)
    assert list(tmp_path.iterdir()) == []
    recorder.record(ValueError("first"))
    recorder.record(ValueError("second"))
    assert json.loads((tmp_path / "0.json").read_text())["message"] == "first"


SCRIPT = """
import os, sys
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader, TensorDataset
from trainwright import Trainer

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        if index == 1 and self.global_rank == 1:
            how = {"kill": lambda: os.kill(os.getpid(), 9), "exit": lambda: os._exit(0), "ctrl-c": self.interrupt}
            how.get(sys.argv[1], self.fail)()
        return self.net(batch[0]).sum()

    def fail(self):
        raise ValueError("boom")

    def interrupt(self):
        raise KeyboardInterrupt

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
data = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=4, **quiet).fit(Module(), data)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "told"), [
    ("raise", "rank 1 of 2 failed with ValueError: boom; the others were ended"),
    ("kill", "rank 1 of 2 was ended by SIGKILL (from outside"),
    ("exit", "rank 1 of 2 ended with exit code 0 before the others"),
    ("ctrl-c", "rank 1 of 2 ended with exit code 1 without an error of its own (KeyboardInterrupt?)"),
])  # fmt: skip
def test_script_prints_one_error(how: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = warm_run([sys.executable, "mine.py", how], capture_output=True, env=environment(), timeout=120, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("trainwright: ") == 1, done.stderr
    assert f"trainwright: {told}" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Connection" not in done.stderr
    assert ("in fail" in done.stderr) == (how == "raise")
    assert "Traceback" in (tmp_path / "logs/rank_0.log").read_text()  # of the connection that it lost


# ---- what is left behind ---------------------------------------------------------------------------------------------


def test_scratch_folders_of_killed_processes(tmp_path: Path) -> None:
    code = (
        "import os, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from trainwright.core.processes.scratch import scratch\n"
        "print(scratch(), flush=True); os.kill(os.getpid(), 9) if sys.argv[2] == 'kill' else input()\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path, "kill"], stdout=subprocess.PIPE, text=True)
    folder = Path(killed.stdout.strip())
    assert folder.is_dir()
    alive = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert alive.stdout is not None
    other = Path(alive.stdout.readline().strip())
    assert not folder.exists()  # the start of the second has removed what the first left
    remove_abandoned(tmp_path)
    assert other.is_dir()
    alive.communicate("\n", timeout=10)
    assert not other.exists()


# ---- a rank that does not listen -------------------------------------------------------------------------------------

STUBBORN = """
import os, signal, sys, threading, time
from trainwright.core.processes.watch import ShutdownWatch
read, write = os.pipe()
signal.signal(signal.SIGTERM, lambda *_: None)
ShutdownWatch(0.3, read).start()
print("ready", flush=True)
if sys.argv[1] == "launcher":
    os.close(write)
while True:
    time.sleep(10)
"""


@pytest.mark.parametrize(("how", "code"), [("signal", 128 + signal.SIGTERM), ("launcher", 128 + signal.SIGKILL)])
def test_unresponsive_process_is_killed(how: str, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", STUBBORN, how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if how == "signal":
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == code


# ---- rendezvous and launchers ----------------------------------------------------------------------------------------


def test_store_listens_on_loopback() -> None:
    from trainwright.launch.ranks.rendezvous import LocalStore

    with LocalStore() as store:
        assert _listening(store.port) == [f"0100007F:{store.port:04X}"]
        with pytest.raises(OSError, match="in use"):
            LocalStore(store.port)
    with LocalStore(store.port) as again:  # as a restart with launch.port has it
        assert again.port == store.port
    assert _listening(store.port) == []


def _listening(port: int) -> list[str]:
    """Return the local addresses (hexadecimal) that listen on a port."""
    return [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    ]


def test_detect_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(environment().keys() ^ os.environ.keys()):
        monkeypatch.delenv(name, raising=False)
    assert detect_launcher() is None
    with monkeypatch.context() as torchrun:
        for name, value in {"RANK": 3, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
            torchrun.setenv(name, str(value))
        torchrun.setenv("MASTER_ADDR", "here")
        torchrun.setenv("MASTER_PORT", "1")
        assert detect_launcher() == Launcher("torchrun", 3, 4, 2)
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert detect_launcher() == Launcher("SLURM", 5, 8, 4)
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert detect_launcher() is None


@pytest.mark.parametrize("refused", [False, True])
def test_agreement(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import HashStore

    store = HashStore()
    monkeypatch.setattr("trainwright.launch.ranks.torchrun_store.meet", lambda launcher: store)
    monkeypatch.setenv("TRAINWRIGHT_RUN_TOKEN", "a secret")  # both ranks are this process

    def decide(launcher: Launcher) -> Any:
        if refused:
            raise ConfigError(["no"])
        return OmegaConf.create({"run_dir": "runs/a b", "max_steps": 3})

    answers: list[Any] = []
    other = threading.Thread(target=lambda: answers.append(agree(Launcher("torchrun", 1, 2, 2), decide)))
    other.start()
    if refused:
        with pytest.raises(ConfigError):
            agree(Launcher("torchrun", 0, 2, 2), decide)
    else:
        assert agree(Launcher("torchrun", 0, 2, 2), decide) == {"run_dir": "runs/a b", "max_steps": 3}
    other.join(10)
    assert answers == ([None] if refused else [{"run_dir": "runs/a b", "max_steps": 3}])


# ---- real ranks ------------------------------------------------------------------------------------------------------


def test_outcomes_of_two_ranks(conf: Path) -> None:
    # One launching process and one fork server for all of them; the script has no `if __name__ == "__main__"`.
    script = Path("runs.py")
    script.write_text(
        "import trainwright, threading\n"
        "def go(name, *more, verb='fit'):\n"
        f"    cfg = trainwright.compose('mine', [*{WORDS[1:]!r}, 'run_dir=' + name, *more], config_dir={str(conf)!r})\n"
        "    try:\n"
        "        print('END', name, trainwright.run(cfg, verb).metrics, flush=True)\n"
        "    except RuntimeError as error:\n"
        "        print('END', name, type(error).__name__, error, flush=True)\n"
        "go('good')\n"
        "go('raise', 'module.fail_rank=1')\n"
        "go('predict', 'ckpt_path=good/checkpoints/step=4', verb='predict')\n"
    )
    started = time.monotonic()
    done = warm_run([sys.executable, script], capture_output=True, env=environment(), timeout=150)
    assert done.returncode == 0, done.stderr
    ends = {part.split()[0]: part for part in done.stdout.split("END ")[1:]}
    assert ends["good"].startswith("good {'loss': ")
    assert "RankError rank 1 of 2 failed with ValueError: boom in rank 1; the others were ended" in ends["raise"]
    assert 'raise ValueError(f"boom in rank {self.global_rank}")' in ends["raise"]
    assert "Traceback" not in done.stdout + done.stderr
    assert "rank 1 is about to fail" in Path("raise/logs/rank_1.log").read_text()
    assert "predict {}" in ends["predict"]
    before_the_first_failure = done.stdout.split("END raise")[0]
    assert "first step of rank 0" in before_the_first_failure
    assert "first step of rank 1" not in before_the_first_failure
    assert "first step of rank 1" in Path("good/logs/rank_1.log").read_text()
    assert OmegaConf.load("good/config.yaml").devices == 2  # type: ignore[union-attr]
    assert time.monotonic() - started < 100
    assert "resource_tracker" not in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("hosts", [1, 2])
def test_torchrun_restarts(hosts: int, conf: Path, tmp_path: Path) -> None:
    """Two hosts are two agents on this machine, with one rank each."""
    kills = "kill(rank=1, at_step=1), kill(rank=0, at_step=3)"
    words = (
        *("fit", "--config-dir", str(conf), *WORDS, "checkpoint.last.every_n_steps=1", f"+inject=[{kills}]"),
        *(f"nodes={hosts}", f"devices={2 // hosts}", "trainer.log_every_n_steps=1"),
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        several = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free.getsockname()[1]}", "--rdzv-id=mine")
    # Alone with the kind of store that misleads ranks.
    place = ("--standalone",) if hosts == 1 else (f"--nnodes={hosts}", *several)
    agent = [sys.executable, "-m", "torch.distributed.run", *place, f"--nproc-per-node={2 // hosts}"]
    # torchrun leaves a folder for logs in the temporary folder.
    more = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    more |= {"TRAINWRIGHT_RUN_TOKEN": "a secret"} if hosts > 1 else {}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment() | more}
    agents = [WarmPopen([*agent, "--max-restarts=3", *command(*words)[1:]], **options) for _ in range(hosts)]
    try:
        said = "\n".join(each.communicate(timeout=250)[0] for each in agents)
    finally:
        for each in agents:
            each.kill()
    assert [each.returncode for each in agents] == [0] * hosts, said
    assert "resuming from" in said
    [run_dir] = Path("runs/mine").iterdir()
    assert {path.name for path in (run_dir / "logs").glob("rank_*")} == {"rank_0.log", "rank_1.log"}
    assert (run_dir / "checkpoints/step=4/manifest.json").exists()
    rows = [line.split(",") for line in (run_dir / "metrics.csv").read_text().splitlines()]
    step, loss = rows[0].index("step"), rows[0].index("loss")
    assert [row[step] for row in rows[1:] if row[loss]] == ["0", "1", "2", "3"]


@pytest.mark.thorough
def test_forkserver_is_safe_to_fork() -> None:
    code = (
        "import trainwright.launch.ranks.preload, gc, os\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 100_000\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    variables = {**environment(), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    assert done.stdout.strip() == "1", done.stderr


def test_launching_process_imports() -> None:
    code = (
        "import re, sys, trainwright.command.verbs, trainwright.launch.local.local, trainwright.command.sweep\n"
        "assert not {name for name in sys.modules if re.match('lightning|torchmetrics', name)}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    light = "import sys, trainwright.command.cli; assert not {'torch', 'hydra', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", light], check=True)
