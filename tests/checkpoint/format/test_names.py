"""Names of a file and names of a module."""

import pytest
import torch
from torch import nn

from trainwright.checkpoint.format.names import match_names, tied_names
from trainwright.core.errors import CheckpointError


class Source:
    def __init__(self, shapes):
        self.shapes = shapes

    def keys(self):
        return self.shapes.keys()

    def shape(self, key):
        return self.shapes[key]

    def dtype(self, key):
        return torch.float32

    def read(self, key, offsets=None, sizes=None):
        raise AssertionError("names are matched without reading")


def blocks(count, prefix=""):
    names = {f"{prefix}layers.{i}.{part}.weight": (4, 4 + (part == "up")) for i in range(count) for part in ("q", "up")}
    return {**names, f"{prefix}norm.weight": (4,)}


PREFIXES = {"": ("", "module.", "module._orig_mod."), "model.": ("", "backbone.", "model._orig_mod.")}
PREFIXES |= {"model.net.": ("",), "model._orig_mod.": ("module.",)}


@pytest.mark.parametrize(("of_module", "of_file"), [(one, other) for one in PREFIXES for other in PREFIXES[one]])
def test_prefixes_on_either_side(of_module, of_file):
    module, source = blocks(12, of_module), blocks(12, of_file)
    matched = match_names(module, Source(source))
    assert matched == dict(zip(module, source, strict=True))


def test_wrappers_within_a_name_do_not_count():
    module = {"model.layers.0._orig_mod.q.weight": (2,), "model.head.weight": (3,)}
    source = {"layers.0.q.weight": (2,), "head.weight": (3,)}
    assert match_names(module, Source(source)) == dict(zip(module, source, strict=True))


ADAPTED = {
    "m.base_model.model.q.base_layer.weight": (4, 4), "m.base_model.model.q.lora_A.default.weight": (2, 4),
    "m.base_model.model.head.original_module.weight": (5, 4),
    "m.base_model.model.head.modules_to_save.default.weight": (5, 4),
}  # fmt: skip
COPIES = {
    "m.base_model.model.q.lora_A.default.weight": "",
    "m.base_model.model.head.modules_to_save.default.weight": "m.base_model.model.head.original_module.weight",
}


def test_wrappers_of_adapters_do_not_count():
    source = {"q.weight": (4, 4), "head.weight": (5, 4)}
    base, adapter, head, copy = ADAPTED
    expected = {base: "q.weight", head: "head.weight", copy: "head.weight"}
    assert match_names(ADAPTED, Source(source), adapters=COPIES) == expected
    with pytest.raises(CheckpointError, match=rf"missing \(1\): {base}"):
        match_names(ADAPTED, Source({"head.weight": (5, 4)}), adapters=COPIES)
    with pytest.raises(CheckpointError, match="No tensor fits|missing"):  # without adapters these are names
        match_names(ADAPTED, Source(source))


def test_adapters_of_the_file_are_all_needed():
    names = {name.removeprefix("m."): shape for name, shape in ADAPTED.items()}
    more = {"m.base_model.model.q.lora_B.default.weight": (4, 2)}
    found = match_names(ADAPTED, Source(names), adapters=COPIES)
    assert found == {name: name.removeprefix("m.") for name in ADAPTED}
    with pytest.raises(CheckpointError, match=r"missing \(1\): .*lora_B"):
        match_names(ADAPTED | more, Source(names), adapters=COPIES | dict.fromkeys(more, ""))


def test_tied_names_that_the_file_lacks():
    module = {"model.embed.weight": (5, 4), "model.norm.weight": (4,), "model.head.weight": (5, 4)}
    source = Source({"embed.weight": (5, 4), "norm.weight": (4,)})
    tied = [("model.embed.weight", "model.head.weight")]
    assert match_names(module, source, tied=tied)["model.head.weight"] == "embed.weight"
    with pytest.raises(CheckpointError, match=r"missing \(1\): model.head.weight"):
        match_names(module, source)


def test_mismatches_are_listed_briefly():
    module = {**blocks(3), **{f"extra.{i}": (1,) for i in range(30)}}
    source = {**blocks(3), "norm.weight": (5,), "lm_head.weight": (2, 2)}
    with pytest.raises(CheckpointError) as caught:
        match_names(module, Source(source), where="weights/")
    text = str(caught.value)
    assert "missing (30): extra.0" in text
    assert "and 22 more" in text
    assert "extra.8" not in text
    assert "unexpected (1): lm_head.weight" in text
    assert "norm.weight: (4,), in the file (5,)" in text
    assert "strict=false" in text
    assert "weights/" in text


def test_not_strict_skips_mismatches():
    module = {**blocks(3), "extra": (1,)}
    source, said = Source({**blocks(3), "norm.weight": (5,), "other": (1,)}), []
    matched = match_names(module, source, strict=False, where="weights/", say=said.append)
    assert set(matched) == set(blocks(3)) - {"norm.weight"}
    assert said == [
        "weights/ was partially loaded; not loaded:\n  missing (1): extra\n  unexpected (1): other\n"
        "  of another shape (1): norm.weight: (4,), in the file (5,)"
    ]


def test_equal_names_win_over_a_copy_with_a_prefix():
    source = Source({**blocks(2, "ema."), **blocks(2)})
    assert match_names(blocks(2), source, strict=False) == {name: name for name in blocks(2)}


COPIES_OF_A_MODEL = {**blocks(2, "student."), **blocks(2, "teacher.")}


@pytest.mark.parametrize(("module", "source", "message"), [
    ({"a.weight": (1,)}, {"b.bias": (1,)}, "No tensor fits"),
    ({"a.weight": (1,)}, {"a.weight": (2,)}, "No tensor fits"),
    # With prefixes on both sides everything must match, or one layer would be loaded into another.
    (blocks(3), {f"layers.{i}.q.weight": (4, 4) for i in (7, 8)}, "No tensor fits"),
    (COPIES_OF_A_MODEL, blocks(2), "more than one way.*student.*teacher|more than one way.*teacher.*student"),
    (blocks(2), COPIES_OF_A_MODEL, "more than one way"),
    ({"a.w": (1,)}, {"a.w": (1,), "a._orig_mod.w": (1,)}, "differ by wrapper names only"),
])  # fmt: skip
def test_errors_even_if_not_strict(module, source, message):
    with pytest.raises(CheckpointError, match=message):
        match_names(module, Source(source), strict=False)


def test_ties_of_a_module():
    class Counter(nn.Module):
        def get_extra_state(self):
            return None

        def set_extra_state(self, state):
            pass

    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), Counter(), Counter())
    module[2].weight = module[0].weight
    assert tied_names(module) == [("0.weight", "2.weight")]
