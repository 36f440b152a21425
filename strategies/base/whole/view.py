"""View of a split module with whole parameters, for user code."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainwright.checkpoint.exchange.distinct import broadcast_value
from trainwright.checkpoint.exchange.groups import wait_for_all
from trainwright.strategies.base.whole.gradients import Gradients
from trainwright.strategies.base.whole.parts import ModuleParts
from trainwright.strategies.base.whole.tables import UnreadableState, whole_tables
from trainwright.strategies.base.whole.tensors import WholeTensor
from trainwright.strategies.contract.attributes import NotCopied
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.contract.same_model import differ_between_ranks

# Attribute of a module with the view that is active after a run.
_AFTER_RUN = "_trainwright_view"
# Timeout for the other ranks before the first gather.
PATIENCE = timedelta(seconds=60)


class WholeView(NotCopied):
    """Temporary replacement of the parameters in a module and its optimizers by stand-ins for the whole ones.

    While shown, all ranks see the names, shapes and gradients of one process. Used values are gathered by all ranks
    together; changes are written back when the view ends. Calls of the module, or of methods of ``surroundings``, use
    the parts.

    Args:
        module: the user's.
        parts: of this rank.
        gradients: of the strategy.
        surroundings: objects with methods, by name, that need the parts.
        agrees: whether all ranks run user code identically; ``False``: replicas differ and are not compared.
        like: an earlier view of the same ranks; ``None``: construction is a collective.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: ModuleParts,
        gradients: Gradients,
        surroundings: Mapping[Any, Mapping[str, Callable[..., Any]]],
        agrees: bool = True,
        like: WholeView | None = None,
    ) -> None:
        self._module, self._parts, self._gradients, self._agrees = module, parts, gradients, agrees
        self._surroundings = [
            (target, {name: self._hidden_for(method) for name, method in methods.items()})
            for target, methods in surroundings.items()
        ]
        self._stand_ins = {
            name: WholeTensor.of(self, name, share.part, share.shape) for name, share in parts.shares.items()
        }
        for name, share in parts.shares.items():
            self._stand_ins[name].__dict__.update(share.part.__dict__)
        self._trained = {name for name, share in parts.shares.items() if share.part.requires_grad}
        self._tables = whole_tables(module, parts.shares, self._stand_ins)
        self._optimizers: list[Optimizer] = []
        self._groups: dict[int, list[list[str]]] = {}
        # Group -> its parameters when last shown, and their stand-ins.
        self._shown_groups: dict[int, tuple[list[Any], list[Any]]] = {}
        self._saved_groups: list[tuple[dict[str, Any], Any, list[Any]]] = []
        self._saved_states: list[tuple[Optimizer, Any, UnreadableState]] = []
        self._where = ""
        self._is_shown = False
        self._modules = frozenset(map(id, module.modules()))  # metrics hash by their states
        self._listening: list[RemovableHandle] = []
        weakref.finalize(self, _end_listening, self._listening)
        self._caller: nn.Module | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._forget()
        self._num_syncs = 0
        self._prefix: str | None
        if like is not None:
            self._prefix = None if like._prefix is None else f"{like._prefix}/after"
        else:
            self._prefix = _common_prefix(parts.device) if agrees else None

    def _forget(self) -> None:
        self._parameters: dict[str, Tensor] = {}
        self._gradient_parts: Mapping[str, Tensor] | None = None
        self._whole_gradients: dict[str, Tensor] = {}
        self._facts: tuple[set[str], set[str]] | None = None
        self._knows_gradients = False
        self._graded: list[str] = []
        self._owned: set[str] = set()
        self._synced = self._used_in_place = False

    # ---- showing and hiding ---------------------------------------------------------------------------------------

    @contextmanager
    def showing(self, where: str, optimizers: list[Optimizer]) -> Iterator[None]:
        """Show whole parameters in a ``with`` block; reentrant.

        Args:
            where: name of the code in the block, for messages.
            optimizers: of the strategy, whose groups get stand-ins.
        """
        if self._is_shown:
            yield
            return
        self._where, self._optimizers = where, optimizers
        self.show()
        try:
            yield
        except BaseException:
            self._restore()
            raise
        self.hide()

    @contextmanager
    def hiding(self) -> Iterator[None]:
        """Restore the parts, with changes so far, in a ``with`` block."""
        if not self._is_shown:
            yield
            return
        self.hide()
        try:
            yield
        finally:
            self.show()

    def show(self) -> None:
        """Put stand-ins into the module and its optimizers."""
        for optimizer in self._optimizers:
            self._show_optimizer(optimizer)
        for owner, table, ghosts in self._tables:
            table.real = owner._parameters
            owner.__dict__["_parameters"] = table
            for key in ghosts:
                ghosts[key] = owner.__dict__.pop(key)
        for target, methods in self._surroundings:
            target.__dict__.update(methods)
        # One global hook, since registering one per module would dominate the time of short user hooks.
        self._listening.append(register_module_forward_pre_hook(_entering(weakref.ref(self))))
        self._is_shown = True

    def show_until_next_run(self, on_end: Callable[[], None]) -> None:
        """Show whole parameters until :func:`end_view`, which calls ``on_end``."""
        self._on_end = on_end
        object.__setattr__(self._module, _AFTER_RUN, self)
        self.show()

    def end(self) -> None:
        """End :meth:`show_until_next_run`."""
        self._on_end()
        self.hide()
        del self._module.__dict__[_AFTER_RUN]

    def hide(self) -> None:
        """Restore the parts and write changes back."""
        self._restore()
        self._write_back()

    def _restore(self) -> None:
        if not self._is_shown:
            return
        self._is_shown = False
        _end_listening(self._listening)
        for target, methods in self._surroundings:
            for name in methods:
                target.__dict__.pop(name, None)
        for owner, table, ghosts in self._tables:
            owner.__dict__["_parameters"] = table.real
            for key, ghost in ghosts.items():
                owner.__dict__[key] = ghost
        self._hide_optimizers()

    def _hidden_for(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.hiding():
                result = method(*args, **kwargs)
            return self._iterate_hidden(result) if isinstance(result, Iterator) else result

        return run

    def _iterate_hidden(self, iterator: Iterator[Any]) -> Iterator[Any]:
        nothing = object()
        while True:
            with self.hiding():
                item = next(iterator, nothing)
            if item is nothing:
                return
            yield item

    # ---- calls of modules -----------------------------------------------------------------------------------------

    def _enter_call(self, module: nn.Module, args: Any) -> None:
        if self._is_shown and id(module) in self._modules:
            self.hide()
            self._caller = module
            module._forward_hooks[id(self)] = self._leave_call
            module._forward_hooks_always_called[id(self)] = True

    def _leave_call(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._caller is module:
            self._caller = None
            del module._forward_hooks[id(self)], module._forward_hooks_always_called[id(self)]
            self.show()

    # ---- optimizers -----------------------------------------------------------------------------------------------

    def _show_optimizer(self, optimizer: Optimizer) -> None:
        names = self._groups.get(id(optimizer), [])
        if len(names) != len(optimizer.param_groups):
            names = self._groups[id(optimizer)] = self._gradients.strategy._group_names(optimizer)
        for group, within in zip(optimizer.param_groups, names, strict=True):
            held, shown = self._shown_groups.get(id(group), ((), []))
            if list(map(id, held)) != list(map(id, group["params"])):
                shown = self._stand_ins_for(group["params"], within)
                self._shown_groups[id(group)] = list(group["params"]), shown
            self._saved_groups.append((group, group["params"], shown))
            group["params"] = list(shown)
        unreadable = UnreadableState(f"{self._where} uses the state of an optimizer, which is split over ranks.")
        self._saved_states.append((optimizer, optimizer.state, unreadable))
        optimizer.state = unreadable  # type: ignore[assignment]

    def _stand_ins_for(self, params: list[Any], within: list[str]) -> list[Any]:
        """Return a group's stand-ins for the names ``within``, followed by its other tensors."""
        held = {id(self._gradients.held_in_optimizer(name)) for name in within if name in self._stand_ins}
        others = [parameter for parameter in params if id(parameter) not in held]
        return [*(self._stand_ins[name] for name in within if name in self._stand_ins), *others]

    def _hide_optimizers(self) -> None:
        for optimizer, state, unreadable in self._saved_states:
            shown: Any = optimizer.state
            optimizer.state = state
            unreadable.give_back(state, shown)
        for group, params, shown in self._saved_groups:
            if list(map(id, group["params"])) != list(map(id, shown)):
                params = self._held(group["params"])
            group["params"] = params
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:  # includes new groups
                if any(isinstance(p, WholeTensor) for p in group["params"]):
                    group["params"] = self._held(group["params"])
        self._saved_groups, self._saved_states = [], []

    def _held(self, parameters: list[Any]) -> list[Any]:
        """Return this rank's optimizer tensors for parameters that user code put into a group."""
        held = [
            self._gradients.held_in_optimizer(p.whole_name) if isinstance(p, WholeTensor) else p for p in parameters
        ]
        return [parameter for parameter in held if parameter is not None]

    def state_stand_ins(self) -> dict[str, WholeTensor]:
        """Return stand-ins for the plain tensors of the whole module's ``state_dict``, by key."""
        names = {id(module): path for path, module in reversed(list(self._module.named_modules()))}
        return {
            ".".join(filter(None, (names[id(owner)], key))): WholeTensor.of(
                self, name, share.part, share.shape, "value"
            )
            for name, share in self._parts.shares.items()
            for owner, key in share.slots
        }

    # ---- interface for stand-ins ----------------------------------------------------------------------------------

    def parameter(self, name: str) -> Tensor:
        """Return the whole parameter, gathered on first use. A collective."""
        share, is_whole = self._parts.shares[name], self._parts.is_whole(name)
        if is_whole and not self._is_shown:
            return share.part
        self._check_shown(name)
        if name not in self._parameters:
            if is_whole:
                whole, self._used_in_place = share.part.detach(), True
            else:
                self._wait_for_ranks(name)
                whole = self._parts.whole(name, share.part if share.is_held else None)
            parameter = nn.Parameter(whole, requires_grad=self.requires_grad(name))
            if parameter.requires_grad:
                # The collector cannot see through such hooks: a reference to this view would leak the module.
                graded = self._graded
                parameter.register_post_accumulate_grad_hook(lambda _: graded.append(name))
            self._parameters[name] = parameter
        return self._parameters[name]

    def own(self, name: str) -> Tensor:
        """Return the whole parameter in memory of its own, which user code may keep or replace. A collective."""
        parameter = self.parameter(name)
        if self._is_shown and self._parts.is_whole(name) and name not in self._owned:
            self._owned.add(name)
            parameter.data = parameter.detach().clone()
        return parameter

    def gradient_stand_in(self, name: str) -> Tensor | None:
        """Return a stand-in for the gradient; ``None`` if there is none."""
        self._check_shown(name)
        self._add_user_gradients()
        if name not in self._known_facts(name)[1]:
            return None
        share = self._parts.shares[name]
        like = self._own_gradients().get(name, share.part)
        return WholeTensor.of(self, name, like, share.shape, "gradient")

    def gradient(self, name: str) -> Tensor:
        """Return the whole averaged gradient. A collective."""
        self._check_shown(name)
        if name not in self._whole_gradients:
            self._wait_for_ranks(name)
            self._whole_gradients[name] = self._parts.whole(name, self._own_gradients().get(name))
        return self._whole_gradients[name]

    def set_gradient(self, name: str, value: Tensor | None) -> None:
        """Set or drop the gradient."""
        self._check_shown(name)
        self._add_user_gradients()
        with_gradient = self._known_facts(name)[1]
        is_held = self._parts.shares[name].is_held
        if value is None:
            with_gradient.discard(name)
            self._whole_gradients.pop(name, None)
            if is_held:
                self._gradients.set_gradient_part(name, None)
                self._gradient_parts = None
        elif name in with_gradient:
            self.gradient(name).copy_(value)
        else:
            with_gradient.add(name)
            if is_held:
                self._gradients.set_gradient_part(name, self._parts.part(name, value.detach()))
                self._gradient_parts = None
            self._whole_gradients[name] = value.detach()

    def requires_grad(self, name: str) -> bool:
        """Return whether the parameter is trained."""
        return name in self._known_facts(name, gradients=False)[0] if self._is_shown else name in self._trained

    def surroundings(self) -> Iterator[tuple[Any, Iterable[str]]]:
        """Yield the objects with methods that need the parts, and the names of these methods."""
        return ((target, methods.keys()) for target, methods in self._surroundings)

    def replace(self, parameters: Mapping[str, Tensor]) -> None:
        """Set whole parameters, which are written to the parts once the view is hidden."""
        home = {name: share.part.device for name, share in self._parts.shares.items()}
        self._parameters = {name: whole.to(home[name]) for name, whole in parameters.items() if name in home}
        self._owned = set(home)

    def set_requires_grad(self, name: str, value: bool) -> None:
        """Freeze or unfreeze the parameter."""
        share = self._parts.shares[name]
        if self._facts is not None:
            (self._facts[0].add if value else self._facts[0].discard)(name)
        (self._trained.add if value else self._trained.discard)(name)
        if share.is_held:
            share.part.requires_grad_(value)

    def refuse(self, name: str, what: str) -> None:
        """Raise, since ``what`` is not possible with a split parameter.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"The parameter {name!r} is split over ranks, which does not support what {self._where or 'user code'} "
            f"does: {what}. Change values in place (copy_, mul_, clamp_ under torch.no_grad()), do this in __init__ "
            f"or configure_model, or use strategy=ddp."
        )

    def _check_shown(self, name: str) -> None:
        if not self._is_shown:
            raise RuntimeError(
                f"The parameter {name!r}, kept since a hook looked it up, is used in a step, where this rank holds a "
                f"part of it. Look parameters up where they are used (self.parameters() in the hook itself), or use "
                f"strategy=ddp."
            )

    def _own_gradients(self) -> Mapping[str, Tensor]:
        if self._gradient_parts is None:
            self._gradient_parts = self._gradients.gradient_parts()
        return self._gradient_parts

    def _known_facts(self, name: str, gradients: bool = True) -> tuple[set[str], set[str]]:
        if self._facts is None or (gradients and not self._knows_gradients):
            if self._parts.has_stages:
                self._wait_for_ranks(name)
            own = self._parts.shares.items()
            trained = [name for name, share in own if share.is_held and share.part.requires_grad]
            self._facts = self._parts.facts(trained, self._own_gradients() if gradients else ())
            self._knows_gradients = gradients
        return self._facts

    def _wait_for_ranks(self, name: str) -> None:
        """Wait for the other ranks before the first collective, to report code that runs on one rank only."""
        if self._synced or self._prefix is None:
            return
        self._synced, self._num_syncs = True, self._num_syncs + 1
        if not wait_for_all(f"{self._prefix}/{self._num_syncs}", PATIENCE):
            raise RuntimeError(
                f"{self._where or 'Code after a run'} of rank {dist.get_rank()} uses the parameter {name!r}, which is "
                f"split over ranks, and other ranks did not within {PATIENCE.seconds} s. Run it on all ranks "
                f"(not under rank_zero_only or `if trainer.is_global_zero`) and use the result on one; "
                f"trainer.save_checkpoint and `trainwright export` write whole weights too."
            )

    # ---- writing --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _write_back(self) -> None:
        in_place = {name for name in self._parameters if self._parts.is_whole(name)} - self._owned
        parameters = {name: whole for name, whole in self._parameters.items() if name not in in_place}
        gradients = self._whole_gradients
        if self._graded:
            self._is_shown = True  # gradients are read as by user code
            self._add_user_gradients()
            self._is_shown = False
        found = [(f"{name}", whole) for name, whole in parameters.items()]
        found += [(f"{name} (gradient)", gradient) for name, gradient in gradients.items()]
        differing = differ_between_ranks(found, self._parts.device) if found and self._agrees else []
        own = self._own_gradients() if gradients else {}
        wrote = False
        for name, whole in parameters.items():
            share = self._parts.shares[name]
            wrote |= share.is_held and _copy_changed(share.part, self._parts.part(name, whole.detach()))
        for name, gradient in gradients.items():
            if name in own:
                _copy_changed(own[name], self._parts.part(name, gradient, own[name]))
        wrote |= self._used_in_place
        self._forget()
        if wrote:
            self._gradients.strategy._parameters_written()
        if differing:
            raise RuntimeError(
                f"After {self._where or 'user code'}, values of {', '.join(differing[:4])} are not the same on all "
                f"ranks. Code that writes them must write the same on every rank: without `if trainer.is_global_zero`, "
                f"and random numbers from a torch.Generator with the same seed everywhere. If it only reads them, they "
                f"differed before: strategy.certificate=refuse names the step's fault."
            )

    def _add_user_gradients(self) -> None:
        """Add gradients of backward passes in user code since the last call."""
        graded = dict.fromkeys(self._graded)
        self._graded.clear()
        for name in graded:
            own, self._parameters[name].grad = self._parameters[name].grad, None
            if own is not None:
                self.set_gradient(name, self.gradient(name) + own if name in self._known_facts(name)[1] else own)


def end_view(module: nn.Module) -> None:
    """End the view of a module after a run, if there is one."""
    view = module.__dict__.get(_AFTER_RUN)
    if isinstance(view, WholeView):
        view.end()


def _entering(view: weakref.ref[WholeView]) -> Callable[[nn.Module, Any], None]:
    """Return a global forward pre-hook that does not keep the view, its module and process groups alive."""

    def enter(module: nn.Module, args: Any) -> None:
        shown = view()
        if shown is not None:
            shown._enter_call(module, args)

    return enter


def _end_listening(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _copy_changed(part: Tensor, value: Tensor) -> bool:
    """Copy ``value`` into ``part`` if they differ; returns whether they did."""
    mine, given = local_tensor(part).detach(), local_tensor(value).detach()
    if torch.equal(mine, given.to(mine.device)):
        return False
    mine.copy_(given)
    return True


def _common_prefix(device: torch.device) -> str | None:
    """Return a random store prefix shared by all ranks; ``None`` on one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return f"trainwright/whole/{broadcast_value(uuid.uuid4().hex, 0, device=device)}"
