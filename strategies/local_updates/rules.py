"""Which options of local updates go together. Nothing here imports torch: the command line asks, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.core.config.options import is_number, is_whole
from trainwright.strategies.averaging.compression.options import compression_problems

# Why tables cannot be on servers while replicas differ.
PLACEMENT = (
    "placement with local updates: servers step tables together with all ranks, and replicas step by themselves; leave "
    "it out, or type strategy=hybrid"
)
MANUAL_OPTIMIZATION = (
    "local updates count the optimizer steps that the Trainer makes, and this module makes its own "
    "(automatic_optimization = False), maybe of several optimizers in turn. Use strategy=ddp (or zero1, zero2) with "
    "it, or let the Trainer step"
)
"""Why a module with manual optimization is refused."""


def local_update_problems(options: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What is wrong with the options of a strategy with local updates; empty if nothing is.

    Args:
        options: of the constructor by name; missing ones are at their default.
        prefix: what stands before an option's name where it is typed (``"strategy."`` on the command line).

    Returns:
        One text per problem: what was given, what is allowed, what to type instead.
    """
    problems = [
        f"{prefix}{name}={value!r} (allowed: whole numbers of at least {least}; {meaning})"
        for name, least, meaning in _COUNTS
        if name in options and not is_whole(value := options[name], least)
    ]
    if problems:
        return problems
    return problems + _streaming_problems(options, prefix) + _outer_problems(options, prefix)


_COUNTS = (
    ("sync_every", 1, "optimizer steps from one synchronisation to the next"),
    ("warmup_steps", 0, "optimizer steps with averaged gradients at the beginning, 0 is off"),
    ("fragments", 1, "parts of the model that are synchronised in turn, 1 is the whole at once"),
    ("overlap_steps", 0, "optimizer steps that an average may take while training goes on, 0 is off"),
)


def _streaming_problems(options: Mapping[str, Any], prefix: str) -> list[str]:
    problems = []
    every, fragments = options.get("sync_every", 1), options.get("fragments", 1)
    overlap, mixing = options.get("overlap_steps", 0), options.get("mixing", 0.5)
    if fragments > every:
        problems.append(
            f"{prefix}fragments={fragments} with {prefix}sync_every={every}: fragments take turns within sync_every "
            f"steps, one at a step at most; type {prefix}fragments={every} or less, or a larger {prefix}sync_every"
        )
    if overlap >= every:
        problems.append(
            f"{prefix}overlap_steps={overlap} with {prefix}sync_every={every}: an average must have been merged before "
            f"the next one of the same parameters begins; type {prefix}overlap_steps={every - 1} or less"
        )
    if not is_number(mixing) or not 0 <= mixing < 1:
        problems.append(
            f"{prefix}mixing={mixing!r} (allowed: 0, which takes the merged parameters as they are, or more, and less "
            "than 1, which would keep a replica's own)"
        )
    return problems


def _outer_problems(options: Mapping[str, Any], prefix: str) -> list[str]:
    problems = []
    lr, momentum = options.get("outer_lr", 0.7), options.get("outer_momentum", 0.9)
    if not is_number(lr) or lr <= 0:
        problems.append(f"{prefix}outer_lr={lr!r} (allowed: above 0; 1 with outer_momentum=0 is the plain average)")
    if not is_number(momentum) or not 0 <= momentum < 1:
        problems.append(f"{prefix}outer_momentum={momentum!r} (allowed: 0, which is off, or more, and less than 1)")
    elif momentum == 0 and options.get("outer_nesterov", False):
        problems.append(
            f"{prefix}outer_nesterov=true with {prefix}outer_momentum=0: Nesterov's momentum needs one; type "
            f"{prefix}outer_nesterov=false, or {prefix}outer_momentum=0.9"
        )
    compression = options.get("compression")
    problems += [f"{prefix}{problem}" for problem in compression_problems(compression)]
    if isinstance(compression, Mapping) and "sends" in compression:
        problems.append(
            f"{prefix}compression.sends is for averages of gradients, and nothing reads it of an outer gradient; leave "
            "it out"
        )
    if isinstance(compression, Mapping) and "warmup_steps" in compression:
        problems.append(
            f"{prefix}compression.warmup_steps is for a compressed optimizer and nothing reads it of an outer "
            f"gradient; leave it out, or type {prefix}warmup_steps=... for steps with averaged gradients"
        )
    return problems


def fragment_problem(fragments: int, blocks: int, prefix: str = "") -> str | None:
    """What is wrong with so many fragments of a model with so many repeated blocks; ``None`` if nothing is."""
    if fragments <= max(blocks, 1):
        return None
    if blocks == 0:
        return (
            f"{prefix}fragments={fragments} of a model in which no repeated blocks were found; name them with "
            f"{prefix}blocks=['model.layers.*'], or type {prefix}fragments=1"
        )
    return (
        f"{prefix}fragments={fragments} of a model with {blocks} block(s) (allowed: 1 to {blocks}, since a fragment is "
        f"made of whole blocks); type {prefix}fragments={blocks}"
    )


def averaging_callback_problem(callback: str) -> str:
    """Why an averaging callback of Lightning cannot be used.

    Args:
        callback: its class.
    """
    return (
        f"{callback} averages over the steps of each replica by itself, and replicas differ between two "
        "synchronisations, so that ranks would evaluate and save different averages. Leave it out, or use strategy=ddp "
        "(or hybrid)"
    )


def sync_batchnorm_problem() -> str:
    """Why BatchNorm statistics over all ranks cannot be had."""
    return (
        "sync_batchnorm=true makes all ranks wait for each other in every BatchNorm of every step, which local updates "
        "are to avoid. Leave it out: running statistics are averaged whenever replicas are synchronised"
    )


def compressed_parameters_problem(compression: Any, prefix: str = "", *, is_group: bool = False) -> str | None:
    """Why averages of parameters are not compressed; ``None`` if that is not asked for.

    Args:
        compression: what was asked for.
        prefix: what stands before an option's name where it is typed.
        is_group: whether it was the group ``compression`` of the command line that asked, which has no prefix.
    """
    name = compression.get("name") if isinstance(compression, Mapping) else compression
    if name in (None, "none"):
        return None
    typed = "compression" if is_group else f"{prefix}compression"
    return (
        f"{typed}={name} with local_sgd, which averages the parameters themselves: what is lost of those "
        f"is lost for good. Use strategy=diloco {prefix}outer_lr=1 {prefix}outer_momentum=0 "
        f"{prefix}outer_nesterov=false, which is local SGD by differences, and compresses these"
    )
