"""Files as torch.save writes them, without all tensors in memory."""

import io
import zipfile
from collections import OrderedDict

import pytest
import torch

from trainwright.checkpoint.foreign.torch_file import LazyTensor, write_torch_file
from trainwright.checkpoint.format.tensor_file import bytes_of

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
DTYPES = [*FLOATS, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool]


def lazy(key, tensor):
    return LazyTensor(key, tuple(tensor.shape), tensor.dtype, lambda: tensor)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)


@pytest.mark.parametrize("mmap", [False, True])
def test_every_dtype_is_read_by_torch_bit_for_bit(tmp_path, mmap):
    tensors = {str(dtype): (torch.randn(7, 5) * 3).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "large": torch.randn(1000, 33)}
    with (tmp_path / "x.pt").open("wb") as file:
        write_torch_file(file, {name: lazy(name, tensor) for name, tensor in tensors.items()})
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None  # the checksums are right too
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
    loaded = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mmap)
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert same(loaded[name], tensor), name
        assert loaded[name].stride() == tensor.stride()
        assert loaded[name].data_ptr() % 64 == 0


def test_plain_values_are_kept(tmp_path):
    tree = OrderedDict(
        step=3, loss=0.25, name="é", nothing=None, flag=True, pair=(1, [2, {"x": torch.Size([1, 2])}]), big=2**80
    )
    tree["memory"] = torch.arange(6).view(2, 3).t()
    with (tmp_path / "x.pt").open("wb") as file:
        write_torch_file(file, tree)
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert isinstance(loaded, OrderedDict)
    assert torch.equal(loaded.pop("memory"), tree.pop("memory"))
    assert loaded == tree


def test_unseekable_output():
    class Stream(io.RawIOBase):
        def __init__(self):
            self.data = bytearray()

        def writable(self):
            return True

        def tell(self):
            return len(self.data)

        def write(self, data):
            self.data += bytes(data)
            return len(data)

    stream, tensor = Stream(), torch.randn(33)
    write_torch_file(stream, {"a": lazy("a", tensor)})
    assert torch.equal(torch.load(io.BytesIO(bytes(stream.data)), weights_only=True)["a"], tensor)


def test_wrong_shape_is_an_error(tmp_path):
    wrong = LazyTensor("w", (3,), torch.float32, lambda: torch.zeros(4))
    with (tmp_path / "x.pt").open("wb") as file, pytest.raises(ValueError, match=r"w was declared with shape \(3,\)"):
        write_torch_file(file, {"w": wrong})
