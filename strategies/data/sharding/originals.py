"""Parameter objects of the module as the user built it, which a strategy replaces by this rank's parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.core.config.options import refuse
from trainwright.strategies.plan.names import folded, joined


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
        present = {p: now[name] for p, name in self._names.items() if name in now and now[name] is not p}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if any(p in present and p in optimizer.state for p in group["params"]):
                    raise ValueError(
                        f"The {type(optimizer).__name__} that configure_optimizers returns was made before the module "
                        "was split, and has a state of whole parameters. Make it in configure_optimizers."
                    )
                group["params"][:] = [present.get(p, p) for p in group["params"]]

    def retire(self, module: nn.Module, optimized_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Make further use of parameters that were replaced an error, rather than a use of old values.

        Args:
            module: as split.
            optimized_of: returns what is optimized in the place of a parameter.

        Raises:
            ValueError: if an attribute of ``module`` holds an ``id()`` of one.
        """
        here = dict(module.named_parameters())  # without those of other stages
        retired = self._names.keys() - {*here.values(), *map(optimized_of, here.values())}
        kept = _attribute_with({id(parameter) for parameter in retired if self._names[parameter] in here}, module)
        if kept:
            raise ValueError(
                f"{kept} holds the id() of parameters, and this strategy replaces the objects, so none would be found. "
                "Compare names (named_parameters), or collect the ids in configure_optimizers."
            )
        for parameter in retired:
            if type(parameter) is nn.Parameter:  # others, such as quantized ones, may have a layout of their own
                parameter.__class__ = Retired
        self._names.clear()


def _attribute_with(ids: Collection[int], module: nn.Module) -> str | None:
    """Return the name of an attribute of ``module`` that is a collection with one of these numbers."""
    for name, sub in module.named_modules():
        for key, value in vars(sub).items():
            if isinstance(value, set | frozenset | list | tuple | dict) and any(
                type(v) is int and v in ids for v in value
            ):
                return joined(name, key)
    return None


def check_memory(module: nn.Module) -> None:
    """Store parameters such that ranks can hold parts of them.

    Raises:
        ValueError: if two share memory.
    """
    refuse(memory_problems(module))
    store_contiguously(module)


def memory_problems(module: nn.Module) -> Iterator[str]:
    """Yield each pair of distinct parameters that share memory, which parts of them would not."""
    spans = []
    for name, p in module.named_parameters():
        if p.numel() and not p.is_meta and not isinstance(p, DTensor):
            last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            start = p.storage_offset() * p.element_size()
            end = start + (last + 1) * p.element_size()
            spans.append((p.untyped_storage().data_ptr(), start, end, name))
    for (storage, _, end, name), (other, start, _, second) in pairwise(sorted(spans)):
        if storage == other and start < end:
            yield (
                f"{name} and {second} are two parameters in the same memory (tied by .data?), and ranks would hold "
                "parts of each. Tie them as one parameter (head.weight = embedding.weight), or type strategy=ddp"
            )


def store_contiguously(module: nn.Module) -> None:
    """Copy parameters with other strides, which cannot be split or sent as they are, such as a transposed view."""
    found = {n: p for n, p in module.named_parameters() if not isinstance(p, DTensor) and not p.is_contiguous()}
    for parameter in found.values():
        parameter.data = parameter.data.contiguous()
    if found:
        rank_zero_info(f"Stored contiguously, so that ranks can share it: {', '.join(folded(found))}.")


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
