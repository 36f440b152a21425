"""The certificate of a run: when it is made or reused, and how its outcome is reported."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from trainwright.strategies.base.certificate.patterns import Patterns
from trainwright.strategies.base.certificate.weights import parts_that_differ, sketches_of_wholes
from trainwright.strategies.base.certificate.written import AsWritten
from trainwright.strategies.contract.gradients import local_tensor

if TYPE_CHECKING:
    from trainwright.strategies.base.certificate.compare import Comparison


class Certificate:
    """Comparison of a layout with the module as written, before the first optimizer step of a run.

    It is repeated, on a later batch, when the autograd graph of a loss is not that of a certified step: a loss or a
    layer that sets in later, say. All ranks agree on that after each of the first steps and one of 16 later ones.

    Args:
        choice: ``"refuse"``, ``"warn"`` or ``"off"``.

    Attributes:
        outcome: of this run's comparison; ``None``: none (yet).
        key: identifies the certified layout and code; empty without a certificate.
        is_due: whether to compare before the next step.
        is_on: whether to compare in this run at all.
        patterns: of the losses.
    """

    def __init__(self, choice: str) -> None:
        self.choice = choice
        self.outcome: Comparison | None = None
        self.key = ""
        self.is_due = self.is_on = False
        self.patterns = Patterns()
        self._written: AsWritten | None = None
        self._weights: Tensor | None = None

    def begin(self, module: nn.Module, trains: bool) -> None:
        """Record a module before a strategy modifies it.

        Args:
            module: of the run.
            trains: whether several ranks will train it.
        """
        self.is_due, self.is_on, self._weights, self.patterns = False, False, None, Patterns()
        self._written = None if self.choice == "off" else AsWritten.of(module)
        if trains and self._written is not None and self._written.is_new:
            is_deferred = any(parameter.is_meta for parameter in module.parameters())
            self._weights = None if is_deferred else sketches_of_wholes(self._written)

    def set_up(self, strategy: Any) -> None:
        """Record the modified module and compare weights; a certificate is due if the module is split. A collective.

        Raises:
            RuntimeError: with ``"refuse"``, if the ranks' shards differ from the first rank's weights.
        """
        if self._written is None:
            return
        self._written.set_up()
        fitting = strategy.lightning_module.trainer.state.fn == "fit"
        self.outcome, self.is_due = None, fitting and strategy.certified.is_split
        if self.is_due and is_param_in_hook_signature(strategy.lightning_module.training_step, "dataloader_iter", True):
            self.is_due = False
            rank_zero_warn("Not certified: training_step reads the data itself (dataloader_iter).")
        self.is_on = self.is_due
        weights, self._weights = self._weights, None
        if self.is_due and strategy.reduce_boolean_decision(weights is not None):
            assert weights is not None
            wrong = parts_that_differ(strategy, self._written, weights)
            if wrong:
                self._report(
                    f"The layout {strategy.layout} holds different values of {wrong} than the module", strategy, wrong
                )

    def before(self, strategy: Any, batch: Any, batch_idx: int) -> None:
        """Compare before a batch, if it is the first or a step has computed something new. A collective.

        Raises:
            RuntimeError: with ``"refuse"``, on every rank, if results differ by more than rounding.
        """
        if self.is_due:
            self._make(strategy, batch, batch_idx)
        elif self.patterns.next_step(strategy.lightning_module.trainer.global_step, batch_idx):
            is_new = self.patterns.has_new
            if not strategy.replicas.are_independent and strategy.reduce_boolean_decision(is_new, all=False):
                self._make_again(strategy, batch, batch_idx)

    def _make_again(self, strategy: Any, batch: Any, batch_idx: int) -> None:
        self.patterns.certificates += 1
        if strategy.reduce_boolean_decision(_is_finite(strategy.lightning_module)):
            self._compare(strategy, batch, batch_idx)
        else:  # a diverged run, in which nothing can be compared
            self.patterns.learn()
        if self.patterns.is_exhausted:
            rank_zero_warn(
                f"Not certified: the computation of steps has changed {self.patterns.certificates} times under "
                f"{strategy.layout}. Later changes are not compared with the module as written."
            )

    def _make(self, strategy: Any, batch: Any, batch_idx: int) -> None:
        """Compare, unless the resumed run was certified for the same layout and code."""
        self.is_due = False
        assert self._written is not None
        key = _key_of(strategy, self._written)
        if strategy.reduce_boolean_decision(strategy.state.resumed_certificate == key):
            self.key = key
            self.patterns.learn()
        elif self._compare(strategy, batch, batch_idx):
            self.key = key

    def _compare(self, strategy: Any, batch: Any, batch_idx: int) -> bool:
        assert self._written is not None
        self.patterns.learn()
        # Imported lazily: only needed for split modules.
        from trainwright.strategies.base.certificate.certify import certify

        outcome = self.outcome = certify(strategy, self._written, batch, batch_idx)
        name = type(strategy.lightning_module).__name__
        if outcome.holds:
            rank_zero_info(f"certified: {strategy.layout} computes what {name} as written does: {outcome.summary()}")
            return True
        step = strategy.lightning_module.trainer.global_step
        when = f"a batch after step {step}" if self.patterns.certificates else "the first batch"
        self._report(
            f"The layout {strategy.layout} does not compute what {name} as written computes on {when}: "
            f"{outcome.problem()}{self._accumulation_hint(strategy) if outcome.wrong else ''}",
            strategy,
            outcome.module,
        )
        return False

    @staticmethod
    def _accumulation_hint(strategy: Any) -> str:
        count = strategy.lightning_module.trainer.accumulate_grad_batches
        hint = (
            f"; accumulation divides the loss by {count}, but no gradients that an autograd.Function adds in backward: "
            "if there is one, use micro-batches as large as the step's (accumulate_grad_batches=1)"
        )
        return hint if count > 1 else ""

    def _report(self, problem: str, strategy: Any, module: str = "") -> None:
        text = f"{problem}. No weight has changed."
        if self.patterns.certificates:
            text = (
                f"{problem}. Steps compute something else than at first, since this step or a few before it; until "
                "then weights are right, so continue from an earlier checkpoint (ckpt_path=...)."
            )
        if self.choice == "refuse":
            raise RuntimeError(
                f"{text} {strategy.certified.remedy(module)} To train anyway, type strategy.certificate=warn "
                "(in Python certificate='warn')."
            )
        rank_zero_warn(f"{text} Training continues (certificate=warn).")


def _is_finite(module: nn.Module) -> bool:
    return all(bool(local_tensor(parameter).detach().isfinite().all()) for parameter in module.parameters())


def _key_of(strategy: Any, written: AsWritten) -> str:
    """Return a digest of a certificate's inputs: layout, options, precision, versions, shapes and source code."""
    module = strategy.lightning_module
    parts = _parts_of_key(strategy, written, module)
    return hashlib.sha256(b"".join(part.encode() + b"\0" for part in parts)).hexdigest()[:32]


def _parts_of_key(strategy: Any, written: AsWritten, module: nn.Module) -> Iterable[str]:
    layout = replace(strategy.layout, replicate=1)  # replicas compute the same, and their number may change
    yield from (str(layout), str(strategy.precision_plugin.precision), torch.__version__)
    options = strategy.options
    names = {each.name for each in fields(options)} - {*layout.sizes, "expert", "certificate", "checks"}
    yield from (f"{name}={getattr(options, name)!r}" for name in sorted(names))
    yield from (f"{each.name}{each.shape}" for each in written.parameters)
    for file in sorted({_source_of(type(sub)) for sub in module.modules()} - {""}):
        with open(file, "rb") as source:
            yield hashlib.sha256(source.read()).hexdigest()


def _source_of(kind: type) -> str:
    try:
        return inspect.getsourcefile(kind) or ""
    except TypeError:
        return ""
