"""What cannot be had where workers lease their samples, as far as it can be told before a process starts."""

from collections.abc import Iterator

from omegaconf import DictConfig


def lease_problems(cfg: DictConfig) -> Iterator[str]:
    """What speaks against leases in a resolved configuration whose strategy is to lease.

    Args:
        cfg: the configuration.
    """
    ending = f"with strategy.leases={cfg.strategy.leases}"
    trainer = cfg.trainer
    interval = trainer.val_check_interval
    if interval is not None and (isinstance(interval, int) or interval != 1.0):
        yield (
            f"trainer.val_check_interval={interval} {ending}: workers meet at the end of an epoch only; type "
            "trainer.val_check_interval=1.0"
        )
    limit = trainer.limit_train_batches
    if isinstance(limit, float) and limit not in (0.0, 1.0):
        yield (
            f"trainer.limit_train_batches={limit} {ending}: type a whole number, micro-batches of each worker on "
            "average"
        )
    if trainer.data_partition != "interleave":
        yield (
            f"trainer.data_partition={trainer.data_partition} {ending}: it says whose samples are whose; type "
            "trainer.data_partition=interleave"
        )
    if trainer.uneven_steps:
        yield f"trainer.uneven_steps=true {ending}: a chunk is a step of one worker; type trainer.uneven_steps=false"
    for name, callback in cfg.checkpoint.items():
        every = callback.get("every_n_steps") if isinstance(callback, DictConfig) else None
        if every is not None:
            yield (
                f"checkpoint.{name}.every_n_steps={every} {ending}: workers make unequal numbers of steps; type "
                f"checkpoint.{name}.every_n_epochs=1"
            )
