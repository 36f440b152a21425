"""Writes of user code into parameters gathered by ZeRO-3."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainwright.strategies.data.sharding.gathering import parameter_groups
from trainwright.strategies.state.shards import rows_of

_DATA: Any = Tensor.data
SET_DATA = _DATA.__set__


class GatheredWrites:
    """Copies writes into gathered parameters back into this rank's shards.

    FSDP2 drops gathered parameters after use, but a user's step may write into those outside of the blocks, which are
    gathered while it runs: a momentum encoder, clamped weights. (Those of blocks are DTensors, written in place.)

    Args:
        state: of the ``fully_shard`` root.
    """

    def __init__(self, state: Any) -> None:
        self._groups = parameter_groups(state)
        self._versions: dict[int, int] = {}
        self._rows: dict[int, tuple[int, int]] = {}

    def begin(self) -> None:
        """Record the versions of shards, right after gathering."""
        self._versions = {id(p): _local(p)._version for p in self._gathered()}

    @torch.no_grad()
    def keep(self) -> None:
        """Copy gathered rows into the shards that were not stepped since :meth:`begin`."""
        for parameter in self._gathered():
            shard = _local(parameter)
            if self._versions.get(id(parameter)) != shard._version:
                continue  # stepped by an optimizer in the meantime
            whole = parameter._unsharded_param.detach()
            if whole.untyped_storage().data_ptr() != parameter.all_gather_outputs[0].untyped_storage().data_ptr():
                refuse_new_data(parameter._module_info.param_name)
            if id(parameter) not in self._rows:
                info = parameter.mesh_info
                self._rows[id(parameter)] = rows_of(whole, info.shard_mesh_size, info.shard_mesh_rank)
            first, last = self._rows[id(parameter)]
            shard.copy_(whole[first:last])
            self._versions[id(parameter)] = shard._version

    def gathered(self) -> Iterator[tuple[Tensor, DTensor]]:
        """Yield each gathered parameter and its shard."""
        for parameter in self._gathered():
            yield parameter._unsharded_param, parameter.sharded_param

    def _gathered(self) -> Iterable[Any]:
        for group in self._groups:
            if group.is_unsharded:
                yield from group.fsdp_params


def forbidding_lost_updates() -> AbstractContextManager[Any]:
    """Raise on operations that FSDP2 does not support and would silently lose."""
    run_backward = torch.autograd._engine_run_backward

    def checked(*args: Any, **kwargs: Any) -> Any:
        if args[3]:  # create_graph
            raise RuntimeError(
                "The step differentiates gradients (create_graph=True, as in a gradient penalty). ZeRO-3 frees the "
                "parameters of a block after its backward, so a second one has none. Use strategy=zero2."
            )
        return run_backward(*args, **kwargs)

    return patch.object(torch.autograd, "_engine_run_backward", checked)


def refuse_new_data(which: str) -> NoReturn:
    """Raise the error of an assignment to ``.data``.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"The step assigns .data of the parameter {which}, which ZeRO-3 gathers and splits, so that the new data would "
        f"be lost. Write into it: parameter.data.copy_(value), or mul_ and add_; or use strategy=zero2."
    )


def _local(parameter: Any) -> Tensor:
    return parameter.sharded_param._local_tensor  # type: ignore[no-any-return]
