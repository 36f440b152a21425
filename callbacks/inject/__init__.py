"""Faults on purpose, each one a sentence: ``inject.kill(rank=1, at_step=7)`` is a callback that does what it says.

``rank`` is a global rank, ``None`` every rank. ``at_step`` counts optimizer steps as ``trainer.global_step`` does
before the step: ``at_step=7`` strikes at the beginning of the eighth one, in its first micro-batch. A fault strikes a
rank ``times`` times in all, restarts of the run included: what has struck is written to ``faults/rank_<n>.json`` in the
Trainer's ``default_root_dir`` before it strikes, so that a kill is not repeated when the run comes back to its step.
``times=None`` strikes whenever the step is reached, which makes a crash loop. A run that begins behind the step is left
alone.

Nothing here imports torch or Lightning before a callback is made: the command line checks sentences with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from trainwright.callbacks.inject.rules import problems_of

if TYPE_CHECKING:
    from trainwright.callbacks.inject.fault import Fault

KINDS = (
    "kill",
    "stop",
    "hang",
    "slow",
    "nan",
    "spike",
    "raise_in",
    "exit",
    "partition",
    "full_disk",
    "corrupt_checkpoint",
    "flip_bit",
    "out_of_memory",
    "soak",
)
"""Names of the functions below, which are the words of a sentence."""


def kill(rank: int | None, at_step: int, *, signal: int = 9, times: int | None = 1) -> Fault:
    """Send this process a signal, by default the one that no process survives.

    Args:
        rank, at_step, times: see the module.
        signal: number of the signal: 9 SIGKILL, 11 SIGSEGV, 15 SIGTERM.
    """
    return _made("process.Kill", "kill", locals())


def stop(rank: int | None, at_step: int, *, times: int | None = 1) -> Fault:
    """Stop this process (SIGSTOP): it lives, holds its connections, and does nothing until somebody continues it."""
    return _made("process.Stop", "stop", locals())


def hang(rank: int | None, at_step: int, how: str = "sleep", *, times: int | None = 1) -> Fault:
    """Wait for ever.

    Args:
        rank, at_step, times: see the module.
        how: ``"sleep"``: asleep in the forward pass, signals are answered; ``"lock"``: in wait for a lock that nobody
            gives back; ``"gil"``: in native code that holds Python's global lock, so no thread of this process runs
            and no handler of a signal; ``"skip_collective"``: in a collective that no other rank enters;
            ``"data"``: while the next batch is waited for.
    """
    return _made("process.Hang", "hang", locals())


def slow(rank: int | None, factor: float, from_step: int = 0, to_step: int | None = None) -> Fault:
    """Let everything that this rank computes take ``factor`` times as long, by sleeping in the forward pass.

    What a micro-batch computes is the processor time of the micro-batch before it, which waiting for others is no part
    of. On CUDA it is three times the time of the forward pass, for which the device is waited for.

    Args:
        rank: see the module.
        factor: more than 1.
        from_step: the first slow optimizer step.
        to_step: the first one that is not slow any more; ``None``: there is none.
    """
    return _made("numbers.Slow", "slow", locals())


def nan(
    rank: int | None, at_step: int, where: str = "loss", parameter: str | None = None, *, times: int | None = 1
) -> Fault:
    """Make a NaN.

    Args:
        rank, at_step, times: see the module.
        where: ``"loss"``: the loss of the micro-batch is NaN, and so are all gradients; ``"gradient"``: the loss is
            right and one element of one gradient is NaN, before ranks exchange gradients.
        parameter: name of the parameter whose gradient is meant; ``None``: the first one that the pass uses.
    """
    return _made("numbers.NaN", "nan", locals())


def spike(rank: int | None, at_step: int, factor: float, *, times: int | None = 1) -> Fault:
    """Multiply the loss of a micro-batch, and so its gradients, by ``factor``."""
    return _made("numbers.Spike", "spike", locals())


def raise_in(
    hook: str,
    rank: int | None = 0,
    at_step: int = 0,
    error: Exception | None = None,
    *,
    times: int | None = 1,
) -> Fault:
    """Raise in a hook.

    Args:
        hook: one of a callback's, such as ``"on_train_batch_end"``, or ``"training_step"``. Hooks between two batches
            belong to the step of the batch before them, those before training to the step at which it begins.
        rank, at_step, times: see the module.
        error: what is raised; ``None``: a ``RuntimeError`` that names the hook.
    """
    return _made("process.raise_in", "raise_in", locals())


def exit(rank: int | None, at_step: int, code: int = 1, *, times: int | None = 1) -> Fault:
    """End this process by ``sys.exit(code)``, as a user's own code may."""
    return _made("process.Exit", "exit", locals())


def partition(ranks: int | Sequence[int], at_step: int, *, times: int | None = 1) -> Fault:
    """Cut the network between ``ranks`` and all others: their TCP connections are shut down, on both sides at once.

    Ranks learn each other's processes once, when training begins (a collective). On one machine exactly the connections
    between the two sides are cut; of other machines, all to those that run a rank of the other side. Connections that
    are no sockets (shared memory, NVLink, InfiniBand) are not touched, nor is the store through which ranks meet,
    unless a rank serves it.
    """
    return _made("network.Partition", "partition", locals())


def full_disk(at_step: int, *, rank: int | None = None, times: int | None = 1) -> Fault:
    """Let this rank's files of a checkpoint fail as if the disk were full (ENOSPC), ``times`` saves from that step on.

    Checkpoints written by other means than the strategies of this project are not touched.
    """
    return _made("storage.FullDisk", "full_disk", locals())


def corrupt_checkpoint(step: int, rank: int = 0, *, times: int | None = 1) -> Fault:
    """Flip a bit in the middle of a tensor file of the checkpoint of ``step``, once it is published.

    Args:
        step: optimizer steps done when the checkpoint was written, as in its manifest.
        rank: whose file; that rank flips it.
        times: see the module.
    """
    return _made("storage.CorruptCheckpoint", "corrupt_checkpoint", locals())


def flip_bit(
    rank: int | None, at_step: int, parameter: str | None = None, *, bit: int | None = None, times: int | None = 1
) -> Fault:
    """Flip one bit of one weight in the memory of this rank, silently.

    Args:
        rank, at_step, times: see the module.
        parameter: its name; ``None``: the first one that this rank holds. The middle element of what it holds is hit.
        bit: counted from the lowest of the number; ``None``: the highest of the mantissa, which changes the weight by a
            quarter to a half.
    """
    return _made("numbers.FlipBit", "flip_bit", locals())


def out_of_memory(rank: int | None, at_step: int, *, times: int | None = 1) -> Fault:
    """Ask the device for more memory than it has, in the forward pass; the allocator raises."""
    return _made("process.OutOfMemory", "out_of_memory", locals())


def soak(
    seed: int, every_seconds: float | Sequence[float] = (20.0, 30.0), kinds: Sequence[str] = ("kill", "stop")
) -> Fault:
    """One fault after the other, for as long as the run lasts, on ranks and of kinds drawn from ``seed``.

    The same seed gives the same faults at the same seconds since the run first began, whatever restarts lie between;
    those whose time has passed while the run was down are left out.

    Args:
        seed: of the draws.
        every_seconds: seconds between two faults, or the least and the most of them.
        kinds: of ``kill``, ``stop``, ``exit`` and ``partition``.
    """
    return _made("soaking.Soak", "soak", locals())


def sentence_of(kind: str, arguments: Mapping[str, Any]) -> str:
    """The sentence as a person would type it; also the name under which it is remembered that a fault struck.

    Args:
        kind: name of a function of this module.
        arguments: all of its arguments, by name; those that are as by default go without saying.
    """
    parameters = signature(globals()[kind]).parameters
    said = [f"{name}={value!r}" for name, value in arguments.items() if value != parameters[name].default]
    return f"{kind}({', '.join(said)})"


def _made(place: str, kind: str, arguments: Mapping[str, Any]) -> Fault:
    """The callback at ``module.Class`` below this package, with arguments that can be meant.

    Raises:
        ValueError: naming everything that is impossible.
    """
    arguments = dict(arguments)
    problems = problems_of(kind, arguments)
    if problems:
        raise ValueError("; ".join(problems))
    module, _, name = place.partition(".")
    made: Fault = getattr(import_module(f"{__name__}.{module}"), name)(**arguments)
    made.sentence = sentence_of(kind, arguments)
    return made
