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


def test_leftovers_are_listed_on_one_screen():
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


def test_not_strict_leaves_out_what_does_not_fit():
    module = {**blocks(3), "extra": (1,)}
    source, said = Source({**blocks(3), "norm.weight": (5,), "other": (1,)}), []
    matched = match_names(module, source, strict=False, where="weights/", say=said.append)
    assert set(matched) == set(blocks(3)) - {"norm.weight"}
    assert said == [
        "weights/ was partially loaded; not loaded:\n  missing (1): extra\n  unexpected (1): other\n"
        "  of another shape (1): norm.weight: (4,), in the file (5,)"
    ]


def test_nothing_in_common_is_an_error_even_if_not_strict():
    with pytest.raises(CheckpointError, match="No tensor fits"):
        match_names({"a.weight": (1,)}, Source({"b.bias": (1,)}), strict=False)


def test_names_of_which_no_shape_fits_are_an_error_even_if_not_strict():
    with pytest.raises(CheckpointError, match="No tensor fits"):
        match_names({"a.weight": (1,)}, Source({"a.weight": (2,)}), strict=False)


def test_two_copies_of_a_model_in_the_module_are_ambiguous():
    module = {**blocks(2, "student."), **blocks(2, "teacher.")}
    with pytest.raises(
        CheckpointError, match="more than one way.*student.*teacher|more than one way.*teacher.*student"
    ):
        match_names(module, Source(blocks(2)), strict=False)


def test_two_copies_of_a_model_in_the_file_are_ambiguous():
    source = Source({**blocks(2, "student."), **blocks(2, "teacher.")})
    with pytest.raises(CheckpointError, match="more than one way"):
        match_names(blocks(2), source, strict=False)


def test_equal_names_win_over_a_copy_with_a_prefix():
    source = Source({**blocks(2, "ema."), **blocks(2)})
    assert match_names(blocks(2), source, strict=False) == {name: name for name in blocks(2)}


def test_two_keys_that_differ_by_a_wrapper_only():
    with pytest.raises(CheckpointError, match="differ by wrapper names only"):
        match_names({"a.w": (1,)}, Source({"a.w": (1,), "a._orig_mod.w": (1,)}))


def test_another_layer_is_no_match_for_a_guess():
    """With prefixes on both sides everything must fit, else one layer would be loaded into another."""
    with pytest.raises(CheckpointError, match="No tensor fits"):
        match_names(blocks(3), Source({f"layers.{i}.q.weight": (4, 4) for i in (7, 8)}), strict=False)


def test_ties_of_a_module():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    assert tied_names(module) == [("0.weight", "2.weight")]


def test_extra_state_is_no_tie():
    class Counter(nn.Module):
        def get_extra_state(self):
            return None

        def set_extra_state(self, state):
            pass

    assert tied_names(nn.Sequential(Counter(), Counter())) == []
