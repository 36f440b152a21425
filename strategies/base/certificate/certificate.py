"""When a certificate is made, what follows from it, and when an earlier one counts."""

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

from trainwright.strategies.base.certificate.weights import parts_that_differ, sketches_of_wholes
from trainwright.strategies.base.certificate.written import AsWritten

if TYPE_CHECKING:
    from trainwright.strategies.base.certificate.compare import Comparison


class Certificate:
    """The comparison of a layout with the module as written, before the first optimizer step of a run.

    Args:
        choice: ``"refuse"``, ``"warn"`` or ``"off"``.

    Attributes:
        outcome: what was found in this run; ``None``: nothing was compared (yet).
        key: of the layout and the code that a certificate holds for; empty without one.
        is_due: whether one is to be made before the next step.
    """

    def __init__(self, choice: str) -> None:
        self.choice = choice
        self.outcome: Comparison | None = None
        self.key = ""
        self.is_due = False
        self._written: AsWritten | None = None
        self._weights: Tensor | None = None

    def begin(self, module: nn.Module, trains: bool) -> None:
        """Take note of a module before a strategy changes it.

        Args:
            module: of the run.
            trains: whether several ranks are to train it.
        """
        self.is_due, self._weights = False, None
        self._written = None if self.choice == "off" else AsWritten.of(module)
        if trains and self._written is not None and self._written.is_new:
            is_deferred = any(parameter.is_meta for parameter in module.parameters())
            self._weights = None if is_deferred else sketches_of_wholes(self._written)

    def set_up(self, strategy: Any) -> None:
        """Take note of what the strategy has changed; one is due if there is something to certify. A collective.

        Raises:
            RuntimeError: with ``"refuse"``, if the parts that ranks hold are not those of the first rank's weights.
        """
        if self._written is None:
            return
        self._written.set_up()
        fitting = strategy.lightning_module.trainer.state.fn == "fit"
        self.outcome, self.is_due = None, fitting and strategy.certified.is_split
        if self.is_due and is_param_in_hook_signature(strategy.lightning_module.training_step, "dataloader_iter", True):
            self.is_due = False
            rank_zero_warn("Nothing is certified: training_step reads the data by itself (dataloader_iter).")
        weights, self._weights = self._weights, None
        if self.is_due and strategy.reduce_boolean_decision(weights is not None):
            assert weights is not None
            wrong = parts_that_differ(strategy, self._written, weights)
            if wrong:
                self._say(
                    f"The layout {strategy.layout} holds other values of {wrong} than the module", strategy, wrong
                )

    def make(self, strategy: Any, batch: Any, batch_idx: int) -> None:
        """Compare, unless the run that is resumed was certified for the same layout and code. A collective.

        Raises:
            RuntimeError: with ``"refuse"``, on every rank, if the numbers differ by more than rounding.
        """
        self.is_due = False
        assert self._written is not None
        key = _key_of(strategy, self._written)
        if strategy.reduce_boolean_decision(strategy.state.certified_before == key):
            self.key = key
            return
        # Loaded when it is needed: a run whose layout splits nothing has no use for it.
        from trainwright.strategies.base.certificate.certify import certify

        outcome = self.outcome = certify(strategy, self._written, batch, batch_idx)
        name = type(strategy.lightning_module).__name__
        if outcome.holds:
            self.key = key
            rank_zero_info(f"certified: {strategy.layout} computes what {name} as written does: {outcome.summary()}")
            return
        self._say(
            f"The layout {strategy.layout} does not compute what {name} as written computes on the first batch: "
            f"{outcome.problem()}",
            strategy,
            outcome.module,
        )

    def _say(self, problem: str, strategy: Any, module: str = "") -> None:
        text = f"{problem}. No weight has changed."
        if self.choice == "refuse":
            raise RuntimeError(
                f"{text} {strategy.certified.remedy(module)} To train all the same, type strategy.certificate=warn "
                "(in Python certificate='warn')."
            )
        rank_zero_warn(f"{text} It trains all the same (certificate=warn).")


def _key_of(strategy: Any, written: AsWritten) -> str:
    """A digest of what a certificate depends on: layout, options, precision, versions, shapes and source code."""
    module = strategy.lightning_module
    digest = hashlib.sha256()
    for part in _parts_of_key(strategy, written, module):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def _parts_of_key(strategy: Any, written: AsWritten, module: nn.Module) -> Iterable[str]:
    layout = replace(strategy.layout, replicate=1)  # replicas come and go, and compute alike
    yield from (str(layout), str(strategy.precision_plugin.precision), torch.__version__)
    options = strategy.options
    told = {each.name for each in fields(options)} - {*layout.sizes, "expert", "certificate", "checks"}
    yield from (f"{name}={getattr(options, name)!r}" for name in sorted(told))
    yield from (f"{each.name}{each.shape}" for each in written.parameters)
    for file in sorted({_source_of(type(sub)) for sub in module.modules()} - {""}):
        with open(file, "rb") as source:
            yield hashlib.sha256(source.read()).hexdigest()


def _source_of(kind: type) -> str:
    try:
        return inspect.getsourcefile(kind) or ""
    except TypeError:
        return ""
