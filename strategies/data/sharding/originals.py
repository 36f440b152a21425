"""Parameter objects of the module as the user built it, which a strategy replaces by this rank's parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from trainwright.strategies.base.kept_parameters import redirect
from trainwright.strategies.plan.names import joined


class Originals:
    """Parameters that user code may have kept: in an optimizer made in ``__init__``, in a list, in a closure.

    Only plain ones: a module with others (quantized ones, say) may be moved by ``torch.utils.swap_tensors``, which
    weak references forbid.

    Args:
        module: before it is partitioned.
    """

    def __init__(self, module: nn.Module) -> None:
        plain = {name: p for name, p in module.named_parameters() if type(p) is nn.Parameter}
        self._ids = {id(parameter): name for name, parameter in plain.items()}
        # Weak, since ZeRO-3 frees the parameters of each block once it is split.
        self._names = WeakTensorKeyDictionary({parameter: name for name, parameter in plain.items()})

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

    def refuse_ids(self, module: nn.Module) -> None:
        """Raise if an attribute of ``module`` holds an ``id()`` of a parameter that was replaced.

        Raises:
            ValueError: naming the attribute.
        """
        here = dict(module.named_parameters())  # without those of other stages
        kept = _attribute_with({i for i, name in self._ids.items() if name in here and id(here[name]) != i}, module)
        if kept:
            raise ValueError(
                f"{kept} holds the id() of parameters, and this strategy replaces the objects, so none would be found. "
                "Compare names (named_parameters), or collect the ids in configure_optimizers."
            )

    def retire(self, module: nn.Module, optimized_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Make parameters that were replaced stand for the present ones, and free their values.

        Args:
            module: as split.
            optimized_of: returns what is optimized in the place of a parameter.
        """
        used = {each for parameter in module.parameters() for each in (parameter, optimized_of(parameter))}
        here = {name for name, _ in module.named_parameters()}
        for parameter, name in [(each, name) for each, name in self._names.items() if each not in used]:
            path, _, key = name.rpartition(".")
            parameter.data = parameter.data.new_empty(0)
            redirect(parameter, module.get_submodule(path), key, name not in here)


def _attribute_with(ids: Collection[int], module: nn.Module) -> str | None:
    """Return the name of an attribute of ``module`` that is a collection with one of these numbers."""
    for name, sub in module.named_modules():
        for key, value in vars(sub).items():
            items = value if isinstance(value, set | frozenset | list | tuple | dict) else ()
            if any(type(item) is int and item in ids for item in items):
                return joined(name, key)
    return None
