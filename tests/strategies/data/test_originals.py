"""Parameter objects that user code kept from before a strategy replaced them, and the memory of parameters."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from trainwright.strategies.base.parameter_memory import memory_problems, store_contiguously
from trainwright.strategies.data.sharding.originals import Originals


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)


def replaced(net: Net) -> Originals:
    """Replace the parameters of the head, as a strategy does."""
    originals = Originals(net)
    net.head.weight = nn.Parameter(net.head.weight.detach()[:1].clone())
    net.head.bias = nn.Parameter(net.head.bias.detach()[:1].clone())
    return originals


def test_optimizers_get_the_present_parameters() -> None:
    net, apart = Net(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(
        [{"params": [*net.head.parameters(), apart]}, {"params": net.body.parameters()}], lr=0.1
    )
    replaced(net).replace_in([optimizer], net)
    held = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert held == [[id(p) for p in (*net.head.parameters(), apart)], [id(p) for p in net.body.parameters()]]


def test_state_of_a_replaced_parameter_is_refused() -> None:
    net = Net()
    optimizer = torch.optim.Adagrad(net.parameters())
    with pytest.raises(ValueError, match="The Adagrad that configure_optimizers returns was made before"):
        replaced(net).replace_in([optimizer], net)


def test_a_kept_parameter_stands_for_the_present_one() -> None:
    net = Net()
    kept = list(net.parameters())
    replaced(net).retire(net, lambda parameter: parameter)
    with torch._C.DisableTorchFunctionSubclass():
        assert kept[2].numel() == 0  # its memory is freed
    (kept[2].square().sum() + torch.stack([kept[3]]).sum()).backward()
    torch.testing.assert_close(net.head.weight.grad, 2 * net.head.weight.detach())
    assert kept[2].grad is net.head.weight.grad
    with torch.no_grad():
        kept[3].fill_(3.0)
    assert net.head.bias.item() == 3.0
    net.head.bias = nn.Parameter(torch.ones(5))
    assert kept[3].shape == (5,)
    assert copy.deepcopy(kept)[3].tolist() == pickle.loads(pickle.dumps(kept[3])).tolist() == [1.0] * 5
    assert {kept[3]: 1}[kept[3]] == 1


def test_a_kept_parameter_of_another_stage_is_refused() -> None:
    net = Net()
    kept, originals = list(net.parameters()), Originals(net)
    del net.head.weight
    net.head.__dict__["weight"] = torch.empty(2, 4, device="meta")
    originals.retire(net, lambda parameter: parameter)
    with pytest.raises(RuntimeError, match="another pipeline stage holds it"):
        kept[2].square()


def test_replaced_parameters_are_freed() -> None:
    net = Net()
    parameter = weakref.ref(net.head.weight)
    originals = replaced(net)
    assert parameter() is None
    originals.retire(net, lambda parameter: parameter)


@pytest.mark.parametrize("collect", [set, list, dict.fromkeys, tuple])
def test_ids_of_replaced_parameters_are_refused(collect) -> None:
    net = Net()
    net.body.ids = collect(id(p) for p in net.parameters())
    with pytest.raises(ValueError, match=r"^body\.ids holds the id\(\) of parameters"):
        replaced(net).refuse_ids(net)
    net = Net()
    net.ids = collect(id(p) for p in net.body.parameters())  # which stay
    replaced(net).refuse_ids(net)


def test_parameters_in_the_same_memory() -> None:
    net = Net()
    both = torch.randn(2, 4, 4)
    net.body.weight, net.head.weight = nn.Parameter(both[0]), nn.Parameter(both[1])
    assert list(memory_problems(net)) == []  # side by side
    net.head.weight = nn.Parameter(both[0].t())
    (problem,) = memory_problems(net)
    assert problem.startswith("body.weight and head.weight are two parameters in the same memory")
    net.requires_grad_(False)
    assert list(memory_problems(net)) == []  # both frozen
    net.body.requires_grad_(True)
    assert len(list(memory_problems(net))) == 1
    net.head.weight = net.body.weight
    assert list(memory_problems(net)) == []  # one parameter
    assert list(memory_problems(nn.Linear(2, 2, device="meta"))) == []
    net.body.weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
    assert next(memory_problems(net)).startswith("body.weight is a TwoTensor, which wraps other tensors")


def test_transposed_weights_are_stored_contiguously() -> None:
    net = Net()
    weight = torch.randn(4, 2)
    net.head.weight = kept = nn.Parameter(weight.t())
    store_contiguously(net)
    assert net.head.weight is kept
    assert kept.is_contiguous()
    assert torch.equal(kept, weight.t())
