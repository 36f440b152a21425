import pytest
import torch

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.write.staging import Staging


def mixed():
    table = torch.arange(24.0).view(4, 6)
    return {
        "weights/a": TensorParts((8, 6), torch.float32, [((0, 0), table[:2]), ((6, 0), table[2:])]),
        "weights/strided": TensorParts((4, 3), torch.float32, [((0, 0), table[:, ::2])]),
        "weights/half": TensorParts.whole(torch.randn(5, 3).bfloat16()),
        "weights/flag": TensorParts.whole(torch.tensor([True, False, True])),
        "weights/none": TensorParts.whole(torch.empty(0, 3)),
        "tree/scalar": TensorParts.whole(torch.tensor(7)),
        "rank/0/rng": TensorParts.whole(torch.arange(9, dtype=torch.uint8)),
        "weights/complex": TensorParts.whole(torch.tensor([1 + 2j])),
    }


def values(tensors):
    return {key: [(offsets, box.clone()) for offsets, box in parts.parts] for key, parts in tensors.items()}


def assert_same(tensors, expected):
    assert tensors.keys() == expected.keys()
    for key, parts in tensors.items():
        for (offsets, box), (other, value) in zip(parts.parts, expected[key], strict=True):
            assert offsets == other
            assert box.dtype == value.dtype
            assert torch.equal(box, value), key


def test_copies_keep_their_values():
    tensors = mixed()
    before = values(tensors)
    staged = Staging().stage(tensors)
    staged.wait()
    for parts in tensors.values():
        for _, box in parts.parts:
            box.copy_(torch.zeros_like(box))
    assert_same(staged.tensors, before)
    assert [parts.shape for parts in staged.tensors.values()] == [parts.shape for parts in tensors.values()]


def test_memory_is_reused():
    staging = Staging()
    first = staging.stage({"a": TensorParts.whole(torch.ones(2**20))})
    held = staging.num_bytes
    again = staging.stage({"a": TensorParts.whole(torch.full((2**20,), 2.0))})
    assert again.block.data_ptr() == first.block.data_ptr()
    assert first.tensors["a"].parts[0][1][0] == 2
    smaller = staging.stage({"a": TensorParts.whole(torch.ones(3))})
    assert smaller.block.data_ptr() == first.block.data_ptr()
    assert staging.num_bytes == held
    grown = staging.stage({"a": TensorParts.whole(torch.ones(2**20 + 2**17))})
    assert grown.block.data_ptr() == first.block.data_ptr()
    staging.stage({"a": TensorParts.whole(torch.ones(2**22))})
    assert staging.num_bytes == 4 * held
    staging.release()
    assert staging.num_bytes == 0


def test_memory_is_prepared():
    staging, tensors = Staging(), {"a": TensorParts.whole(torch.ones(2**20))}
    staging.prepare(tensors)
    block = staging._arenas[False]._block
    assert block is not None
    assert staging.num_bytes == 2**22
    staged = staging.stage(tensors)
    assert staged.block.data_ptr() == block.data_ptr()
    assert staged.tensors["a"].parts[0][1].unique().tolist() == [1]
    staging.prepare(tensors)  # keeps its contents
    assert staged.tensors["a"].parts[0][1].unique().tolist() == [1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_from_cuda_keep_their_values():
    staging = Staging()
    source = torch.full((2**26,), 1.0, device="cuda")
    tensors = {"a": TensorParts.whole(source), "b": TensorParts.whole(torch.ones(3))}
    for value in range(1, 6):
        source.fill_(value)
        staged = staging.stage(tensors)
        for _ in range(20):
            source.add_(100.0)
        staged.wait()
        assert staged.tensors["a"].parts[0][1].unique().tolist() == [value]
        assert staged.block.is_pinned()
        source.zero_()
