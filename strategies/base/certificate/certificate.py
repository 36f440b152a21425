"""The certificate of a run: when it is made or reused, and how its outcome is reported."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from trainwright.core.run.phases import CERTIFICATE
from trainwright.strategies.base.certificate.sketch import parts_that_differ, sketches_of_wholes
from trainwright.strategies.base.certificate.spots import (
    FIRST,
    STRUCTURE,
    Check,
    Patterns,
    SpotChecks,
    largest_of_ranks,
)
from trainwright.strategies.base.certificate.written import AsWritten
from trainwright.strategies.contract.gradients import local_tensor

if TYPE_CHECKING:
    from trainwright.strategies.base.certificate.compare import Comparison

_UNCHANGED = "No weight has changed."
# Of later steps: if the batch is the first of its kind, and otherwise.
_PROMPT = (
    "This step has not changed a weight: once this is corrected, resume from the last checkpoint (ckpt_path=last)."
)
_LATE = "Weights are right up to step {}: once it is corrected, resume from a checkpoint of then (ckpt_path=...)."


class Certificate:
    """Comparison of a layout with the module as written, before the first optimizer step of a run.

    It is repeated, on a later batch, when the autograd graph of a loss is not that of a certified step (a loss or a
    layer that sets in later, say), when a batch has a new structure, and before drawn steps (``spots.py``). All ranks
    agree on what is new after each of the first steps and one of 16 later ones. A single data rank, whose ranks all
    read the same batch, compares a batch of a new structure at once; several compare a copy when they agree.

    Args:
        choice: ``"refuse"``, ``"warn"`` or ``"off"``.

    Attributes:
        checks: comparisons of this run.
        key: identifies the certified layout and code; empty without a certificate.
        is_due: whether to compare before the next step.
        is_on: whether to compare in this run at all.
        patterns: of the losses.
        spots: later comparisons; ``None`` before the first step.
    """

    def __init__(self, choice: str) -> None:
        self.choice = choice
        self.checks: list[Check] = []
        self.key = ""
        self.is_due = self.is_on = False
        self.patterns = Patterns()
        self.spots: SpotChecks | None = None
        self._written: AsWritten | None = None
        self._weights: Tensor | None = None

    @property
    def outcome(self) -> Comparison | None:
        """Outcome of the last comparison of this run; ``None``: none (yet)."""
        return self.checks[-1].outcome if self.checks else None

    def begin(self, module: nn.Module, trains: bool) -> None:
        """Record a module before a strategy modifies it.

        Args:
            module: of the run.
            trains: whether several ranks will train it.
        """
        self.is_due, self.is_on, self._weights, self.patterns = False, False, None, Patterns()
        self.spots, self._written = None, AsWritten.of(module)
        if trains and self.choice != "off" and self._written.is_new:
            is_deferred = any(parameter.is_meta for parameter in module.parameters())
            self._weights = None if is_deferred else sketches_of_wholes(self._written)

    @property
    def written(self) -> AsWritten:
        """The module before the strategy modified it, once the strategy is set up."""
        assert self._written is not None
        return self._written

    def set_up(self, strategy: Any) -> None:
        """Record the modified module and compare weights; a certificate is due if the module is split. A collective.

        Raises:
            RuntimeError: with ``"refuse"``, if the ranks' shards differ from the first rank's weights.
        """
        self.written.set_up()
        fitting = strategy.lightning_module.trainer.state.fn == "fit" and self.choice != "off"
        self.checks, self.is_due = [], fitting and strategy.certified.is_split
        if self.is_due and is_param_in_hook_signature(strategy.lightning_module.training_step, "dataloader_iter", True):
            self.is_due = False
            rank_zero_warn("Not certified: training_step reads the data itself (dataloader_iter).")
        self.is_on = self.is_due
        weights, self._weights = self._weights, None
        if self.is_due and strategy.reduce_boolean_decision(weights is not None):
            assert weights is not None
            if wrong := parts_that_differ(strategy, self.written, weights):
                self._report(
                    f"The layout {strategy.layout} holds different values of {wrong} than the module", strategy, wrong
                )

    def before(self, strategy: Any, batch: Any, batch_idx: int) -> None:
        """Compare before a batch, if it is the first, drawn, or something is new. A collective.

        Raises:
            RuntimeError: with ``"refuse"``, on every rank, if results differ by more than rounding.
        """
        step = strategy.lightning_module.trainer.global_step
        is_compared = self.is_due and self._make(strategy, batch, batch_idx, step)
        if self.spots is not None:
            self.spots.see(batch, step, self.patterns.is_watching)
            if self.spots.next_step(step) and not is_compared:  # between two steps, gradients are being accumulated
                self._spot(self.spots, strategy, batch, batch_idx)

    def _make(self, strategy: Any, batch: Any, batch_idx: int, step: int) -> bool:
        """Compare, unless the resumed run was certified for the same layout and code; return whether it did."""
        self.is_due, trainer = False, strategy.lightning_module.trainer
        key, (resumed, known) = _key_of(strategy, self.written), strategy.state.resumed_certificate
        is_known = bool(strategy.reduce_boolean_decision(resumed == key))
        self.patterns.learn()
        if is_known or self._compare(strategy, batch, batch_idx, FIRST, step):
            self.key = key
        if not strategy.replicas.are_independent:
            cost = 0.0 if self.outcome is None else self.outcome.written_seconds
            self.spots = SpotChecks(getattr(trainer, "data_seed", 0), step, known if is_known else (), cost)
            if not self.spots.known:
                self.spots.learn(strategy, batch)
        return not is_known

    def _spot(self, spots: SpotChecks, strategy: Any, batch: Any, batch_idx: int) -> None:
        step, has_graph, has_batch = strategy.lightning_module.trainer.global_step, False, spots.new is not None
        if self.patterns.next_step(batch_idx):
            has_graph, has_batch = spots.agree(strategy, self.patterns.has_new, has_batch)
        elif strategy.ranks.num_data_ranks > 1:  # each reads its own batch
            has_batch = False
        if not (spots.is_drawn(step) or has_graph or has_batch):
            return
        batch, of_step = spots.new or (batch, step)
        new = "; ".join(spots.learn(strategy, batch)[:3])
        reason = "new graph" if has_graph else f"{STRUCTURE}: {new}" if has_batch else "drawn"
        self.patterns.certificates += has_graph
        self.patterns.learn()
        # Nothing can be compared in a diverged run.
        if strategy.reduce_boolean_decision(_is_finite(strategy.lightning_module)):
            self._compare(strategy, batch, batch_idx, reason, of_step)
            spots.spend(self.checks[-1].outcome, is_new=has_batch)
        if has_graph and self.patterns.is_exhausted:
            rank_zero_warn(
                f"Not certified: the computation of steps has changed {self.patterns.certificates} times under "
                f"{strategy.layout}. Later changes are not compared with the module as written."
            )

    def _compare(self, strategy: Any, batch: Any, batch_idx: int, reason: str, of_step: int) -> bool:
        """Compare a batch, read after ``of_step`` optimizer steps; return whether results agree."""
        # Imported lazily: only needed for split modules.
        from trainwright.strategies.base.certificate.certify import certify

        trainer, name = strategy.lightning_module.trainer, type(strategy.lightning_module).__name__
        with trainer.phases.within(CERTIFICATE) if hasattr(trainer, "phases") else nullcontext():
            outcome = certify(strategy, self.written, batch, batch_idx)
        seconds, written, since = largest_of_ranks(strategy, outcome.seconds, outcome.written_seconds, -of_step)
        check = Check(trainer.global_step, reason, replace(outcome, seconds=seconds, written_seconds=written))
        self.checks.append(check)
        if outcome.holds:
            rank_zero_info(f"certified: {strategy.layout} computes what {name} as written does: {check.summary()}")
            return True
        when, advice = FIRST, _UNCHANGED
        if reason != FIRST:
            right = max((each.step for each in self.checks if each.outcome.holds), default=0)
            is_prompt = reason.startswith(STRUCTURE) and -since == check.step
            when, advice = f"batch after step {-since:.0f} ({reason})", _PROMPT if is_prompt else _LATE.format(right)
        problem = f"does not compute what {name} as written computes on the {when}: {outcome.problem()}"
        problem += _accumulation_hint(strategy) if outcome.wrong else ""
        self._report(f"The layout {strategy.layout} {problem}", strategy, outcome.module, advice)
        return False

    def _report(self, problem: str, strategy: Any, module: str = "", advice: str = _UNCHANGED) -> None:
        text = f"{problem}. {advice}"
        if self.choice == "refuse":
            raise RuntimeError(
                f"{text} {strategy.certified.remedy(module)} To train anyway, type strategy.certificate=warn "
                "(in Python certificate='warn')."
            )
        rank_zero_warn(f"{text} Training continues (certificate=warn).")


def _accumulation_hint(strategy: Any) -> str:
    count = strategy.lightning_module.trainer.accumulate_grad_batches
    hint = (
        f"; accumulation divides the loss by {count}, but no gradients that an autograd.Function adds in backward: "
        "if there is one, use micro-batches as large as the step's (accumulate_grad_batches=1)"
    )
    return hint if count > 1 else ""


def _is_finite(module: nn.Module) -> bool:
    return all(bool(local_tensor(parameter).detach().isfinite().all()) for parameter in module.parameters())


def _key_of(strategy: Any, written: AsWritten) -> str:
    """Return a digest of a certificate's inputs: layout, options, precision, versions, shapes and source code."""
    parts = _parts_of_key(strategy, written, strategy.lightning_module)
    return hashlib.sha256(b"".join(part.encode() + b"\0" for part in parts)).hexdigest()[:32]


def _parts_of_key(strategy: Any, written: AsWritten, module: nn.Module) -> Iterable[str]:
    layout = replace(strategy.layout, replicate=1)  # replicas compute the same, and their number may change
    yield from (str(layout), str(strategy.precision_plugin.precision), torch.__version__)
    options = strategy.options
    names = {each.name for each in fields(options)} - {*layout.sizes, "expert", "certificate", "checks"}
    yield from (f"{name}={getattr(options, name)!r}" for name in sorted(names))
    yield from (f"{each.name}{each.shape}" for each in written.parameters)
    files = {_source_of(type(sub)) for sub in module.modules()}
    for file in sorted(file for file in files if file):
        with open(file, "rb") as source:
            yield hashlib.sha256(source.read()).hexdigest()
    if None in files:  # cells change from run to run: never the key of another run
        yield uuid4().hex


def _source_of(kind: type) -> str | None:
    """Return the file that defines a class; ``""``: none, ``None``: a cell of a notebook."""
    try:
        return inspect.getsourcefile(kind) or ""
    except TypeError:
        return ""
    except OSError:
        return None
