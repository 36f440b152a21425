"""Fault injection: ``inject.kill(rank=1, at_step=7)`` creates a callback that injects the fault.

``rank`` is a global rank, ``None`` every rank. ``at_step`` counts optimizer steps like ``trainer.global_step``: a fault
with ``at_step=7`` strikes at the start of the eighth step, in its first micro-batch. It strikes a rank ``times`` times
in all, restarts of the run included: strikes are recorded in ``faults/rank_<n>.json`` in the Trainer's
``default_root_dir`` beforehand, so that a kill is not repeated after a restart. ``times=None`` strikes whenever the
step is reached, which makes a crash loop. A run that starts after the step is not affected.

Importing this package loads neither torch nor Lightning: the command line parses with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from trainwright.callbacks.inject.rules import problems_of
from trainwright.core.config.options import refuse

if TYPE_CHECKING:
    from trainwright.callbacks.inject.fault import Fault

KINDS = (
    "kill", "stop", "hang", "slow", "nan", "spike", "raise_in", "exit", "partition", "full_disk",
    "corrupt_checkpoint", "flip_bit", "out_of_memory", "soak",
)  # fmt: skip
"""Names of the functions below."""


def kill(rank: int | None, at_step: int, *, signal: int = 9, times: int | None = 1) -> Fault:
    """Send this process a signal, by default SIGKILL.

    Args:
        rank, at_step, times: see the module.
        signal: number of the signal: 9 SIGKILL, 11 SIGSEGV, 15 SIGTERM.
    """
    return _create("process.Kill", "kill", locals())


def stop(rank: int | None, at_step: int, *, times: int | None = 1) -> Fault:
    """Stop this process (SIGSTOP): it keeps its connections, and does nothing until it is continued."""
    return _create("process.Stop", "stop", locals())


def hang(rank: int | None, at_step: int, how: str = "sleep", *, times: int | None = 1) -> Fault:
    """Hang forever.

    Args:
        rank, at_step, times: see the module.
        how: ``"sleep"``: in the forward pass, still handling signals; ``"lock"``: in a deadlock; ``"gil"``: in native
            code that holds the GIL, so that neither threads nor signal handlers run; ``"skip_collective"``: in a
            collective that no other rank enters; ``"data"``: while waiting for the next batch.
    """
    return _create("process.Hang", "hang", locals())


def slow(rank: int | None, factor: float, from_step: int = 0, to_step: int | None = None) -> Fault:
    """Slow this rank's computation down by ``factor``, by sleeping in the forward pass.

    The sleep is based on the processor time of the previous micro-batch, which excludes waiting for others; on CUDA on
    three times the duration of the forward pass, which is synchronized.

    Args:
        rank: see the module.
        factor: more than 1.
        from_step: the first slow optimizer step.
        to_step: the first one that is no longer slow; ``None``: none.
    """
    return _create("numbers.Slow", "slow", locals())


def nan(
    rank: int | None, at_step: int, where: str = "loss", parameter: str | None = None, *, times: int | None = 1
) -> Fault:
    """Inject a NaN.

    Args:
        rank, at_step, times: see the module.
        where: ``"loss"``: the loss of the micro-batch, and so all gradients; ``"gradient"``: one element of one
            gradient, before gradients are reduced.
        parameter: name of the parameter whose gradient is hit; ``None``: the first one used in the pass.
    """
    return _create("numbers.NaN", "nan", locals())


def spike(rank: int | None, at_step: int, factor: float, *, times: int | None = 1) -> Fault:
    """Multiply the loss of a micro-batch, and so its gradients, by ``factor``."""
    return _create("numbers.Spike", "spike", locals())


def raise_in(
    hook: str, rank: int | None = 0, at_step: int = 0, error: Exception | None = None, *, times: int | None = 1
) -> Fault:
    """Raise in a hook.

    Args:
        hook: one of a callback's, such as ``"on_train_batch_end"``, or ``"training_step"``. Hooks between two batches
            belong to the step of the batch before, hooks before training to its first step.
        rank, at_step, times: see the module.
        error: the exception; ``None``: a ``RuntimeError`` that names the hook.
    """
    return _create("process.raise_in", "raise_in", locals())


def exit(rank: int | None, at_step: int, code: int = 1, *, times: int | None = 1) -> Fault:
    """Exit this process by ``sys.exit(code)``."""
    return _create("process.Exit", "exit", locals())


def partition(ranks: int | Sequence[int], at_step: int, *, times: int | None = 1) -> Fault:
    """Partition the network: shut down TCP connections between ``ranks`` and all others, on both sides at once.

    Ranks exchange their process ids once when training starts (a collective). On one machine exactly the connections
    between the two sides are cut; across machines all connections to those that run a rank of the other side.
    Connections that are no sockets (shared memory, NVLink, InfiniBand) are not affected, nor is the rendezvous store,
    unless a rank serves it.
    """
    return _create("network.Partition", "partition", locals())


def full_disk(at_step: int, *, rank: int | None = None, times: int | None = 1) -> Fault:
    """Fail this rank's checkpoint files as if the disk were full (ENOSPC), in ``times`` saves from that step on.

    Only checkpoints of this project's strategies are affected.
    """
    return _create("storage.FullDisk", "full_disk", locals())


def corrupt_checkpoint(step: int, rank: int = 0, *, times: int | None = 1) -> Fault:
    """Flip a bit in the middle of a tensor file of the checkpoint of ``step``, after it is published.

    Args:
        step: of the checkpoint, as in its manifest.
        rank: writer of the file, which flips the bit.
        times: see the module.
    """
    return _create("storage.CorruptCheckpoint", "corrupt_checkpoint", locals())


def flip_bit(
    rank: int | None, at_step: int, parameter: str | None = None, *, bit: int | None = None, times: int | None = 1
) -> Fault:
    """Flip one bit of one weight in this rank's memory, silently.

    Args:
        rank, at_step, times: see the module.
        parameter: name; ``None``: the first one that this rank holds. The middle element of its local part is hit.
        bit: counted from the lowest; ``None``: the highest of the mantissa, which changes the weight by a quarter to a
            half.
    """
    return _create("numbers.FlipBit", "flip_bit", locals())


def out_of_memory(rank: int | None, at_step: int, *, times: int | None = 1) -> Fault:
    """Allocate more memory than the device has, in the forward pass; the allocator raises."""
    return _create("process.OutOfMemory", "out_of_memory", locals())


def soak(
    seed: int, every_seconds: float | Sequence[float] = (20.0, 30.0), kinds: Sequence[str] = ("kill", "stop")
) -> Fault:
    """Inject one fault after another for as long as the run lasts, on ranks and of kinds drawn from ``seed``.

    The same seed gives the same faults at the same seconds since the run first started, independent of restarts; faults
    that were due while the run was down are skipped.

    Args:
        seed: of the random numbers.
        every_seconds: seconds between two faults, or their minimum and maximum.
        kinds: of ``kill``, ``stop``, ``exit`` and ``partition``.
    """
    return _create("soaking.Soak", "soak", locals())


def sentence_of(kind: str, arguments: Mapping[str, Any]) -> str:
    """Return the expression as a user would type it; also the key of the fault's recorded strikes.

    Args:
        kind: name of a function of this module.
        arguments: all of its arguments by name; defaults are left out.
    """
    parameters = signature(globals()[kind]).parameters
    shown = [f"{name}={value!r}" for name, value in arguments.items() if value != parameters[name].default]
    return f"{kind}({', '.join(shown)})"


def _create(place: str, kind: str, arguments: Mapping[str, Any]) -> Fault:
    """Create the callback at ``module.Class`` in this package.

    Raises:
        ValueError: naming all invalid arguments.
    """
    arguments = dict(arguments)
    refuse(problems_of(kind, arguments))
    module, _, name = place.partition(".")
    fault: Fault = getattr(import_module(f"{__name__}.{module}"), name)(**arguments)
    fault.sentence = sentence_of(kind, arguments)
    return fault
