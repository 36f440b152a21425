"""Parameter objects of the module as the user built it, which a strategy replaces by this rank's parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class Originals:
    """Parameters that user code may have kept: in an optimizer made in ``__init__``, in a list, in a closure.

    Args:
        module: before it is partitioned.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}

    def replace_in(self, optimizers: Iterable[Optimizer], module: nn.Module) -> None:
        """Give optimizers the parameters that ``module`` has now.

        Raises:
            ValueError: if one has state of a parameter that was replaced.
        """
        now = dict(module.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                replaced = [p for p in group["params"] if p in self._names and p is not now[self._names[p]]]
                if not optimizer.state.keys().isdisjoint(replaced):
                    raise ValueError(
                        f"The {type(optimizer).__name__} that configure_optimizers returns was made before the module "
                        "was split, and has a state of whole parameters. Make it in configure_optimizers."
                    )
                group["params"][:] = [now[self._names[p]] if p in self._names else p for p in group["params"]]

    def retire(self, used: Collection[Tensor]) -> None:
        """Make further use of parameters that are not ``used`` any more an error, rather than a use of old values."""
        for parameter in self._names.keys() - used:
            parameter.__class__ = Retired
        self._names.clear()


class Retired(nn.Parameter):
    """A parameter that its module no longer has."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a name; there is no value to show."""
        return "<parameter replaced by the strategy>"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse every use."""
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} uses a parameter that was kept from before training, as in a list, "
            "which the strategy has replaced by this rank's part. Get it from the module where it is used, for example "
            "by self.parameters(), or type strategy=ddp."
        )
