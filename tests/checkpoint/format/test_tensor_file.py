import io
import json
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.checkpoint.format import tensor_file
from trainwright.checkpoint.format.tensor_file import DTYPES, TensorEntry, TensorFileReader, TensorFileWriter
from trainwright.core.errors import CheckpointError


def write(tensors, metadata=None):
    file = io.BytesIO()
    writer = TensorFileWriter(file, [TensorEntry(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()], metadata)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    assert writer.num_bytes == len(file.getvalue())
    return file.getvalue()


def read(data):
    with TensorFileReader(lambda: io.BytesIO(data)) as reader:
        return {name: reader.read(name) for name in reader.entries}


def of_dtype(dtype, *shape):
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.arange(count).remainder(2 if dtype is torch.bool else 120)
    return data.to(torch.uint8).view(dtype).reshape(shape)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


ALL = {code: of_dtype(dtype, 3, 4) for code, dtype in DTYPES.items()}
SHAPES = {
    "number": torch.tensor(3.5),
    "odd": torch.arange(5, dtype=torch.uint8),
    "empty": torch.empty(0, 7),
    "none": torch.empty(3, 0),
    "deep": torch.randn(2, 3, 4, 5),
    'ärger/"quoted"\n': torch.ones(1),
}


def test_what_is_written_is_read():
    tensors = {**ALL, **SHAPES}
    values = read(write(tensors))
    assert list(values) == list(tensors)
    assert all(same(values[name], tensors[name]) for name in tensors)


def test_the_safetensors_package_reads_it_and_files_of_the_package_are_read():
    tensors = {**SHAPES, **{code: ALL[code] for code in ALL if code in safetensors.torch._TYPES}}
    assert len(tensors) > 20
    data = safetensors.torch.save(tensors, {"format": "pt", "note": "x"})
    for values in (safetensors.torch.load(write(tensors, {"format": "pt"})), read(data)):
        assert values.keys() == tensors.keys()
        assert all(same(values[name], tensors[name]) for name in tensors)
    assert TensorFileReader(lambda: io.BytesIO(data)).metadata == {"format": "pt", "note": "x"}


def test_alignment_and_empty_files():
    assert read(write({})) == safetensors.torch.load(write({})) == {}
    assert struct.unpack("<Q", write({"abc": torch.ones(2)})[:8])[0] % 8 == 0


@pytest.mark.parametrize("tensor", [
    torch.randn(6, 8).t(),
    torch.randn(6, 8)[:, ::2],
    torch.randn(1).expand(4, 5),
    torch.randn(4, 5, dtype=torch.complex64).conj(),
    torch.randn(3, 2, requires_grad=True),
    torch.nn.Parameter(torch.randn(3, 3)),
])  # fmt: skip
def test_any_strides(tensor):
    value = read(write({"x": tensor}))["x"]
    assert torch.equal(value, tensor.detach().resolve_conj())


@pytest.mark.parametrize("shape", [(64, 100), (3, 2000), (1, 5000), (2, 3, 700)])
def test_large_strided_tensors_are_written_in_blocks(monkeypatch, shape):
    monkeypatch.setattr(tensor_file, "_BLOCK", 1000)
    tensor = torch.randn(shape).transpose(0, -1).contiguous().transpose(0, -1)
    assert tensor.numel() < 4 or not tensor.is_contiguous() or 1 in shape
    sizes = []

    class File(io.BytesIO):
        def write(self, data):
            sizes.append(len(data))
            return super().write(data)

    file = File()
    writer = TensorFileWriter(file, [TensorEntry("x", tensor.dtype, tuple(tensor.shape))])
    writer.write("x", tensor)
    writer.close()
    assert torch.equal(read(file.getvalue())["x"], tensor)
    if not tensor.is_contiguous():
        assert max(sizes[1:]) <= 1000


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.randn(1000)
    seen = []

    class File:
        def write(self, data):
            seen.append(data)

    writer = TensorFileWriter(File(), [TensorEntry("x", tensor.dtype, (1000,))])
    writer.write("x", tensor)
    tensor.fill_(2)
    assert bytes(seen[1]) == bytes(tensor.numpy())


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    offsets = tuple(draw(st.integers(0, length)) for length in shape)
    sizes = tuple(draw(st.integers(0, length - offset)) for length, offset in zip(shape, offsets, strict=True))
    return shape, offsets, sizes, draw(st.sampled_from([0, 1, 8, 100])), draw(st.sampled_from([1, 50, 1 << 20]))


@given(boxes())
@settings(max_examples=300, deadline=None)
def test_any_box(case):
    shape, offsets, sizes, worth_seeking, block = case
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    data = write({"before": torch.ones(3, dtype=torch.uint8), "x": tensor, "after": torch.ones(2)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "_WORTH_SEEKING", worth_seeking)
        patch.setattr(tensor_file, "_BLOCK", block)
        value = TensorFileReader(lambda: io.BytesIO(data)).read("x", offsets, sizes)
    assert value.is_contiguous()
    assert torch.equal(value, tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))])


class Counting(io.BytesIO):
    got = 0

    def readinto(self, buffer):
        count = super().readinto(buffer)
        self.got += count
        return count


def test_no_extra_bytes_are_read():
    tensor = torch.randn(1000, 16)
    file = Counting(write({"a": torch.ones(99), "x": tensor}))
    assert torch.equal(TensorFileReader(lambda: file).read("x", (10, 0), (5, 16)), tensor[10:15])
    assert file.got == 5 * 16 * 4
    tensor = torch.randn(4, 3, 70_000)  # rows worth seeking
    file = Counting(write({"x": tensor}))
    assert torch.equal(TensorFileReader(lambda: file).read("x", (1, 1, 0), (2, 1, 70_000)), tensor[1:3, 1:2])
    assert file.got == 2 * 70_000 * 4


@pytest.mark.parametrize(("offsets", "sizes"), [
    ((3, 0), (2, 1)), ((-1, 0), (1, 1)), ((0,), (1,)), ((0, 0), (1, -1)), ((5, 0), None), ((0,), None),
])  # fmt: skip
def test_boxes_outside_of_the_tensor(offsets, sizes):
    reader = TensorFileReader(lambda: io.BytesIO(write({"x": torch.ones(4, 4)})))
    with pytest.raises(ValueError, match="has no box"):
        reader.read("x", offsets, sizes)
    with pytest.raises(KeyError):
        reader.read("y")


def test_a_closed_reader_opens_again():
    opened = []
    data = write({"x": torch.ones(2)})

    def open():
        opened.append(io.BytesIO(data))
        return opened[-1]

    reader = TensorFileReader(open)
    reader.read("x")
    reader.read("x")
    reader.close()
    reader.close()
    assert torch.equal(reader.read("x"), torch.ones(2))
    reader.close()
    assert len(opened) == 2
    assert all(file.closed for file in opened)


def test_tensors_come_in_the_order_of_their_entries():
    entries = [TensorEntry("a", torch.float32, (2,)), TensorEntry("b", torch.float32, (2,))]
    writer = TensorFileWriter(io.BytesIO(), entries)
    with pytest.raises(ValueError, match="next tensor to write is 'a', not 'b'"):
        writer.write("b", torch.ones(2))
    with pytest.raises(ValueError, match=r"announced as torch.float32 of shape \(2,\), and is torch.float64"):
        writer.write("a", torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="announced as"):
        writer.write("a", torch.ones(3))
    writer.write("a", torch.ones(2))
    with pytest.raises(ValueError, match="1 tensors are missing, first 'b'"):
        writer.close()
    writer.write("b", torch.ones(2))
    writer.close()
    with pytest.raises(ValueError, match="All 2 tensors are written"):
        writer.write("c", torch.ones(2))


def test_unsupported_entries():
    for entries, message in (
        ([TensorEntry("x", torch.complex128, (1,))], "torch.complex128, which the safetensors format does not have"),
        ([TensorEntry("x", torch.uint8, (1,))] * 2, "two tensors named 'x'"),
        ([TensorEntry("__metadata__", torch.uint8, (1,))], "__metadata__"),
    ):
        with pytest.raises(CheckpointError, match=message):
            TensorFileWriter(io.BytesIO(), entries)


def with_header(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(1,), place=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(place)}


@pytest.mark.parametrize(("data", "message"), [
    (b"", "0 bytes"),
    (b"\0" * 7, "7 bytes"),
    (struct.pack("<Q", 1 << 63) + b"{}", "header should have"),
    (struct.pack("<Q", 3) + b"{}", "header should have 3"),
    (struct.pack("<Q", 0), "header should have 0"),
    (with_header(b"[]"), "not a JSON object"),
    (with_header(b"{]"), "not JSON"),
    (with_header(b"\xff\xfe"), "not JSON"),
    (with_header(b"[" * 50_000), "nests deeper than 200 levels"),
    (with_header({"x": 3}), "'x' is described by 3"),
    (with_header({"x": {**entry(), "more": 1}}, b"1234"), "is described by"),
    (with_header({"x": entry(dtype="F33")}, b"1234"), "dtype 'F33'.*known are F64"),
    (with_header({"x": entry(dtype=["F32"])}, b"1234"), "dtype"),
    (with_header({"x": entry(shape=(-1,))}, b"1234"), "shape"),
    (with_header({"x": entry(shape=(True,))}, b"1234"), "shape"),
    (with_header({"x": entry(shape=(1.0,))}, b"1234"), "shape"),
    (with_header({"x": entry(shape=(0, 1 << 62, 1 << 62), place=(0, 0))}), "shape"),
    (with_header({"x": entry(place=(0, 4, 8))}, b"1234"), "position"),
    (with_header({"x": entry(place=(4, 0))}, b"1234"), "needs 4 bytes"),
    (with_header({"x": entry(place=(0, 5))}, b"12345"), "needs 4 bytes"),
    (with_header({"x": entry(place=(1, 5))}, b"12345"), "begins at 1"),
    (with_header({"x": entry(), "y": entry(place=(2, 6))}, b"123456"), "begins at 2, and the tensor before"),
    (with_header({"x": entry(), "y": entry(place=(5, 9))}, b"123456789"), "begins at 5"),
    (with_header({"x": entry()}, b"123"), "describes"),
    (with_header({"x": entry()}, b"12345"), "describes"),
    (with_header({"x": entry(), "__metadata__": {"a": 1}}, b"1234"), "mapping of texts"),
    (with_header(b'{"x":%b,"x":%b}' % ((json.dumps(entry()).encode(),) * 2), b"1234"), "repeats a key"),
])  # fmt: skip
def test_files_that_are_not_of_the_format(data, message):
    with pytest.raises(CheckpointError, match=rf"not a complete safetensors file \(.*{message}"):
        TensorFileReader(lambda: io.BytesIO(data))


def test_truncation_is_found():
    data = write({"x": torch.randn(30), "y": torch.randn(5, 5)})
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            TensorFileReader(lambda length=length: io.BytesIO(data[:length]))
    file = io.BytesIO(data)
    reader = TensorFileReader(lambda: file)
    file.truncate(len(data) - 10)  # while it is open
    with pytest.raises(CheckpointError, match="truncated: 10 bytes of 'y' are missing"):
        reader.read("y")
