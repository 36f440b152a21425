"""Rendezvous of ranks: stores, and the environment variables that torch and Lightning read."""

import os
from datetime import timedelta

from omegaconf import DictConfig
from torch.distributed import TCPStore

from trainwright.core.processes.machine import threads_of_rank
from trainwright.core.processes.rendezvous import listen_at, loopback_interfaces
from trainwright.core.text.messages import token_environment

ADDRESS = "127.0.0.1"


class LocalStore:
    """A TCP store in this process.

    torch's own rendezvous listens on every interface and chooses the port before it binds it, so that two runs may
    choose the same. Here the process binds the port itself, to one address only, and the ranks are its clients. Every
    attempt has a new store, so ranks never read addresses of dead ones.

    Args:
        port: TCP port; None = a free one.
        address: to listen at; the loopback interface unless other machines must reach it.
        public_address: that address as the others reach it; None = the same.
        timeout: of a rank that waits for the others.

    Raises:
        OSError: if another process listens on the port.
    """

    def __init__(
        self,
        port: int | None = None,
        address: str = ADDRESS,
        public_address: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        with listen_at(address, port or 0) as listener:
            self.address = public_address or address
            """The address for the ranks."""
            self.port: int = listener.getsockname()[1]
            """The port."""
            self.store = TCPStore(
                self.address,
                self.port,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            """The store itself, until it is closed."""

    def __enter__(self) -> "LocalStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the port; ranks can no longer connect."""
        del self.store


def rank_environment(cfg: DictConfig, rank: int, port: int, attempt: int = 0) -> dict[str, str]:
    """Return the variables of this process plus those of one rank of this machine.

    Args:
        cfg: the resolved configuration; all its ranks are on this machine.
        rank: global rank.
        port: of the store of this attempt.
        attempt: number of restarts.
    """
    return {
        **os.environ,
        **_shared_machine(cfg),
        **token_environment(),
        **of_rank(rank, cfg.devices, (ADDRESS, port), attempt),
        # Lightning treats a process with this variable as a rank started by a launcher.
        "TORCHELASTIC_RUN_ID": f"{cfg.name}-{os.getpid()}",
    }


def of_rank(
    rank: int, world_size: int, store: tuple[str, int], attempt: int, local_size: int | None = None
) -> dict[str, str]:
    """Return the variables that differ between ranks or attempts.

    Args:
        rank: global rank.
        world_size: number of ranks.
        store: address and port of the store of this attempt.
        attempt: number of earlier rendezvous.
        local_size: ranks per machine; None = all.
    """
    size = local_size or world_size
    found = {
        "RANK": rank,
        "LOCAL_RANK": rank % size,
        "ROLE_RANK": rank,
        "GROUP_RANK": rank // size,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": world_size // size,
        "ROLE_NAME": "trainwright",
        "MASTER_ADDR": store[0],
        "MASTER_PORT": store[1],
        # Tells torch that rank 0 need not open the store.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {name: str(value) for name, value in found.items()}


def _shared_machine(cfg: DictConfig) -> dict[str, str]:
    """Return defaults for ranks that share a machine; the user's settings have priority."""
    errors = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    return {
        "OMP_NUM_THREADS": threads_of_rank(cfg.launch.threads, cfg.devices),
        errors: os.environ.get(errors, "1"),
        **loopback_interfaces(),
    }
