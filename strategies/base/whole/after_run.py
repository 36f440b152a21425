"""A split module after a run, for code that moves, converts, copies or pickles it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.strategies.base.certificate.written import AsWritten, WrittenParameter
from trainwright.strategies.base.parameter_memory import apply_beside
from trainwright.strategies.base.whole.parts import ModuleParts
from trainwright.strategies.base.whole.view import WholeView
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.plan.module_state import ModuleLooks


class AfterRun:
    """Makes a split module an ordinary one where code after a run needs that.

    ``copy.deepcopy`` and ``pickle`` (``torch.save``) of the module, or of a submodule, give one as written by the user,
    with whole parameters. Until the next run, so does the module itself after ``module.to(...)`` or the like that
    changes the device or dtype of parameters. All ranks must do so together: parameters are gathered.

    Args:
        module: the user's.
        view: of its whole parameters, shown until the next run.
        parts: of this rank.
        written: the module before the strategy modified it.
        refuse_call: a forward pre-hook of the module while it is split; ``None``: it can be called.
    """

    def __init__(
        self,
        module: nn.Module,
        view: WholeView,
        parts: ModuleParts,
        written: AsWritten,
        refuse_call: Callable[..., None] | None,
    ) -> None:
        self._module, self._view, self._shares, self._written = module, view, parts.shares, written
        self._refuse_call = refuse_call
        self._methods: dict[str, Callable[..., Any]] = {
            "_apply": self._apply,
            "__deepcopy__": self._copied,
            "__reduce_ex__": self._reduced,
        }
        # Read now, since parts stand for the whole parameters of an ordinary module.
        self._kinds = {name: (share.part.dtype, share.part.device) for name, share in parts.shares.items()}
        self._modules = list(module.modules())
        self._attached, self._ordinary = ExitStack(), ExitStack()
        self._released: list[ModuleLooks] = []  # as they were when the module became ordinary

    def attach(self) -> None:
        """Replace methods of the module and its submodules, while the view is shown."""
        for sub in self._modules:
            vars(sub).update({name: partial(method, sub) for name, method in self._methods.items()})
            self._attached.callback(_drop, sub, self._methods)
        if self._refuse_call is not None:
            handle = self._module.register_forward_pre_hook(self._refuse_call, prepend=True)
            self._attached.callback(handle.remove)

    def end(self) -> None:
        """Split the module again, with the values that it has now.

        Raises:
            ValueError: if parameters have another dtype or shape than before.
        """
        self._attached.close()
        if not self._released:
            return
        parameters = {each.name: _registered(each) for each in self._written.parameters}
        self._refuse_others(parameters)
        changes = [
            {key: value for key, value in ModuleLooks.of(sub).state.items() if looks.state.get(key) is not value}
            for sub, looks in zip(self._modules, self._released, strict=True)
        ]
        self._released = []
        self._ordinary.close()
        for sub, changed in zip(self._modules, changes, strict=True):
            for key, value in changed.items():
                setattr(sub, key, value)
        self._view.replace(parameters)

    def _refuse_others(self, parameters: Mapping[str, Tensor]) -> None:
        for name, share in self._shares.items():
            whole, (dtype, _) = parameters[name], self._kinds[name]
            if (whole.dtype, whole.shape) != (dtype, share.shape):
                raise ValueError(
                    f"{name} is {whole.dtype} of shape {tuple(whole.shape)} since code after the last run has changed "
                    f"it, and was {dtype} of shape {tuple(share.shape)}. Convert the module back before the next "
                    "run, or build it anew and load a checkpoint: ckpt_path=."
                )

    def _apply(self, sub: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Run ``nn.Module._apply``, on which ``to``, ``cpu``, ``half`` and others are based."""
        probes = [torch.empty(0, dtype=dtype, device=device) for dtype, device in set(self._kinds.values())]
        if all(function(probe) is probe and not probe.is_shared() for probe in probes):
            with self._view.hiding():
                apply_beside(sub, function)
            return sub
        self._attached.close()
        self._ordinary.enter_context(self._as_written(self._module))
        for target, names in self._view.surroundings():
            methods = {name: partial(self._run_split, target, name) for name in names}
            self._ordinary.enter_context(with_attributes(target, **methods))
        self._released = [ModuleLooks.of(each) for each in self._modules]
        return sub._apply(function, recurse)

    def _run_split(self, target: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method that needs the parts, such as one that saves a checkpoint."""
        self.end()
        self.attach()
        return getattr(target, name)(*args, **kwargs)

    def _copied(self, sub: nn.Module, memo: dict[int, Any]) -> nn.Module:
        self._attached.close()
        try:
            with self._as_written(sub):
                return copy.deepcopy(sub, memo)
        finally:
            self.attach()

    def _reduced(self, sub: nn.Module, protocol: Any) -> Any:
        within = set(map(id, sub.modules()))
        if any(each.name in self._shares and _is_within(each, within) for each in self._written.parameters):
            return self._copied(sub, {}).__reduce_ex__(protocol)
        # Not copied, since its values, such as those of a loss, may be part of a graph.
        reduced: Any = type(sub).__reduce_ex__(sub, protocol)
        function, arguments, state, *rest = reduced
        return function, arguments, {key: value for key, value in state.items() if key not in self._methods}, *rest

    @contextmanager
    def _as_written(self, sub: nn.Module) -> Iterator[None]:
        """Show the module as written in a ``with`` block, with whole parameters in ``sub``. A collective."""
        within = set(map(id, sub.modules()))
        parameters = {each.name: self._whole(each, within) for each in self._written.parameters}
        with self._view.hiding(), self._written.shown(parameters, torch.device("cpu")):
            yield

    def _whole(self, written: WrittenParameter, within: set[int]) -> nn.Parameter:
        name = written.name
        if name not in self._shares:
            return _registered(written)
        whole = (
            self._view.own(name).detach() if _is_within(written, within) else torch.empty(written.shape, device="meta")
        )
        return nn.Parameter(whole, requires_grad=self._view.requires_grad(name))


def _is_within(written: WrittenParameter, modules: Container[int]) -> bool:
    return any(id(owner) in modules for owner, _ in written.slots)


def _registered(written: WrittenParameter) -> nn.Parameter:
    owner, key = written.slots[0]
    parameter = owner._parameters[key]
    assert parameter is not None
    return parameter


def _drop(module: nn.Module, names: Any) -> None:
    for name in names:
        vars(module).pop(name, None)
