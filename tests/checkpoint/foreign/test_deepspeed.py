"""DeepSpeed's checkpoints, read without DeepSpeed."""

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoint.foreign.deepspeed_files import (
    STEP,
    deepspeed_modules,
    make_trained,
    write_deepspeed,
    write_universal,
)
from trainwright.checkpoint.foreign.deepspeed.reading import is_deepspeed, read_deepspeed
from trainwright.core.errors import CheckpointError

SUB_GROUPS = [["emb.weight"], ["back.weight"], ["scalar", "back.bias", "norm.weight", "norm.bias"]]
LAYOUTS = [
    {"stage": 1, "ranks": 1},
    {"stage": 1, "ranks": 2, "dtype": torch.bfloat16},
    {"stage": 1, "ranks": 2, "dtype": torch.bfloat16, "bf16_optimizer": True},
    {"stage": 2, "ranks": 2},
    {"stage": 2, "ranks": 3},
    {"stage": 2, "ranks": 8, "dtype": torch.bfloat16},
    {"stage": 3, "ranks": 1},
    {"stage": 3, "ranks": 2},
    {"stage": 3, "ranks": 3, "dtype": torch.bfloat16},
    {"stage": 3, "ranks": 8},
    {"stage": 3, "ranks": 2, "sub_groups": SUB_GROUPS},
]


def check(found, trained):
    """Every weight and state, bit for bit, under its name."""
    expected = trained.everything()
    assert set(found.weights.keys()) == set(expected)
    for name, weight in expected.items():
        assert found.weights[name].shape == tuple(weight.shape)
        assert found.weights[name].dtype == weight.dtype
        assert torch.equal(found.weights[name].read(), weight), name
    assert found.weights["head"] is found.weights["emb.weight"]
    assert set(found.optimizer) == set(trained.moments)
    for name, moments in trained.moments.items():
        assert set(found.optimizer[name]) == {"step", *moments}
        assert found.optimizer[name]["step"].read().item() == STEP
        for key, value in moments.items():
            assert torch.equal(found.optimizer[name][key].read(), value), (name, key)
    assert [group["params"] for group in found.param_groups] == [list(group) for group in trained.groups]
    assert [group["weight_decay"] for group in found.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(str(value) for value in layout.values())[:40])
def test_reads_every_stage(tmp_path, layout):
    trained = make_trained(frozen_dtype=layout.get("dtype", torch.float32))
    step = write_deepspeed(tmp_path / "run", trained, **layout)
    assert is_deepspeed(tmp_path / "run")
    assert is_deepspeed(step)
    for path in (tmp_path / "run", step):
        found = read_deepspeed(path)
        check(found, trained)
        assert (found.stage, found.ranks, found.global_step) == (layout["stage"], layout["ranks"], 5)
        assert found.lr_scheduler == {"last_batch_iteration": 4}
        assert found.version == "0.19.8"
        assert found.path == str(step)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reads_universal(tmp_path, stage):
    trained = make_trained()
    folder = write_universal(tmp_path / "universal", trained, stage)
    assert is_deepspeed(folder)
    check(read_deepspeed(folder), trained)
    (tmp_path / "latest_universal").write_text("universal")
    check(read_deepspeed(tmp_path), trained)


def test_reading_changes_nothing_and_shares_no_memory(tmp_path):
    trained = make_trained(frozen_dtype=torch.bfloat16)
    step = write_deepspeed(tmp_path / "run", trained, stage=1, ranks=2, dtype=torch.bfloat16)
    before = {file.name: file.read_bytes() for file in step.iterdir()}
    found = read_deepspeed(step)
    found.weights["table"].read().zero_()
    found.weights["emb.weight"].read().zero_()
    check(found, trained)
    assert {file.name: file.read_bytes() for file in step.iterdir()} == before
    for file in step.glob("*optim_states.pt"):  # without ZeRO
        file.unlink()
    found = read_deepspeed(step)
    assert found.stage == 0
    assert not found.optimizer
    assert found.weights.keys() == trained.everything().keys()


def test_opening_reads_no_weights(tmp_path):
    """Files are memory-mapped."""
    trained = make_trained()
    trained.groups[0]["emb.weight"] = torch.zeros(1 << 20, 4)
    trained.moments["emb.weight"] = {"exp_avg": torch.zeros(1 << 20, 4), "exp_avg_sq": torch.zeros(1 << 20, 4)}
    write_deepspeed(tmp_path / "run", trained, stage=2, ranks=2)
    before = resident()
    found = read_deepspeed(tmp_path / "run")
    assert torch.equal(found.weights["back.weight"].read(), trained.parameters["back.weight"])
    # The files hold 64 MiB.
    assert resident() - before < 8 << 20


def resident() -> int:
    """Bytes of memory that this process holds, pages of mapped files that it read included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_client_state(tmp_path):
    others = {"ours": [{"a": Recorded()}], "class": Recorded, "known": OrderedDict, "array": np.arange(3)}
    client = {"epoch": 3, "loops": {"fit": {"done": 2}}, **others}
    write_deepspeed(tmp_path / "run", make_trained(), stage=2, ranks=1, client=client)
    found = read_deepspeed(tmp_path / "run")
    assert found.epoch == 3
    assert found.client == {"loops": {"fit": {"done": 2}}}
    assert found.left_out == [
        f"ours: {__name__}.Recorded",
        f"class: {__name__}.Recorded",
        "known: <class 'collections.OrderedDict'>",
        "array: numpy._core.multiarray._reconstruct",
    ]


class Recorded:
    """What a caller may have given to DeepSpeed."""


def test_reads_optimizers_that_count_steps_by_group(tmp_path):
    step = write_deepspeed(tmp_path / "run", make_trained(), stage=2, ranks=2)

    def by_group(state):
        base = state["optimizer_state_dict"]["base_optimizer_state"]
        for values in base["state"].values():
            del values["step"]
        for group in base["param_groups"]:
            group["step"] = 7

    for rank in range(2):
        edit(step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", by_group)
    assert {state["step"].read().item() for state in read_deepspeed(step).optimizer.values()} == {7.0}


def test_refuses_another_order_of_parameters(tmp_path):
    """Newer versions write the places of the parameters down; weights must not silently land elsewhere."""
    step = write_deepspeed(tmp_path / "run", make_trained(), stage=2, ranks=2)

    def swap(state):
        first, *others = state["param_shapes"]
        state["param_shapes"] = [dict(reversed(first.items())), *others]

    edit(step / "mp_rank_00_model_states.pt", swap)
    with pytest.raises(CheckpointError, match="has another position on rank 0"):
        read_deepspeed(step)
    # With this option the written places are those without it, and the order of the shapes is the true one.
    config = {"zero_optimization": {"round_robin_gradients": True}}
    edit(step / "mp_rank_00_model_states.pt", lambda state: state.update(ds_config=config))
    assert read_deepspeed(step).weights["back.weight"].read().shape == (7, 5)


def test_refuses_universal_of_round_robin(tmp_path):
    folder = write_universal(tmp_path / "universal", make_trained(), 2)
    config = {"zero_optimization": {"round_robin_gradients": True}}
    edit(folder / "mp_rank_00_model_states.pt", lambda state: state.update(ds_config=config))
    with pytest.raises(CheckpointError, match="Import the original"):
        read_deepspeed(folder)


def fewer_values(state):
    flats = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    flats[0] = flats[0][:-20].clone()


DAMAGES = {
    "mp_rank_00_model_states.pt": [
        lambda state: state.pop("param_shapes"),
        lambda state: state.pop("module"),
        lambda state: state["param_shapes"][0].update({"emb.weight": (130, 70)}),
        lambda state: state["param_shapes"][0].update({"emb.weight": (-13, -7)}),
        lambda state: state["param_shapes"][0].update({"emb.weight": "thirteen"}),
        lambda state: state.update(module=[1, 2]),
    ],
    "zero_pp_rank_1_mp_rank_00_optim_states.pt": [
        fewer_values,
        lambda state: state.pop("optimizer_state_dict"),
        lambda state: state["optimizer_state_dict"].pop("single_partition_of_fp32_groups"),
        lambda state: state["optimizer_state_dict"]["base_optimizer_state"]["state"][0].pop("exp_avg"),
    ],
}


@pytest.mark.parametrize(("name", "damage"), [(name, d) for name, damages in DAMAGES.items() for d in damages])
def test_refuses_malformed_files(tmp_path, name, damage):
    step = write_deepspeed(tmp_path / "run", make_trained(), stage=2, ranks=2)
    edit(step / name, damage)
    with pytest.raises(CheckpointError, match=r"damaged, or not in DeepSpeed's form .*zero_to_fp32\.py"):
        read_deepspeed(step)


def test_refuses_missing_and_truncated_files(tmp_path):
    step = write_deepspeed(tmp_path / "run", make_trained(), stage=3, ranks=3)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = (step / name).read_bytes()
    (step / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt .*damaged"):
        read_deepspeed(step)
    (step / name).unlink()
    with pytest.raises(CheckpointError, match="no file like zero_pp_rank_2.* for the ranks 1"):
        read_deepspeed(step)
    (step / name.replace("_1_", "_2_")).rename(step / name)
    with pytest.raises(CheckpointError, match="written by 3 ranks, but has files of 2"):
        read_deepspeed(step)


@pytest.mark.parametrize(("name", "reason"), [
    ("mp_rank_01_model_states.pt", "tensor parallelism"),
    ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
    ("layer_03-model_states.pt", "pipeline or expert parallelism"),
    ("layer_0_expert_3_mp_rank_00_model_states.pt", "pipeline or expert parallelism"),
])  # fmt: skip
def test_refuses_other_parallelism(tmp_path, name, reason):
    step = write_deepspeed(tmp_path / "run", make_trained(), stage=2, ranks=2)
    (step / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{reason}.*save_16bit_model"):
        read_deepspeed(step)


def test_missing_checkpoints(tmp_path):
    with pytest.raises(CheckpointError, match="There is no folder"):
        read_deepspeed(tmp_path / "none")
    assert not is_deepspeed(tmp_path / "none")
    assert not is_deepspeed(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no file mp_rank_00_model_states\.pt"):
        read_deepspeed(tmp_path)
    (tmp_path / "latest").write_text("global_step7")
    assert not is_deepspeed(tmp_path)
    with pytest.raises(CheckpointError, match="names a missing checkpoint"):
        read_deepspeed(tmp_path)


def test_names_stay_in_the_folder(tmp_path):
    write_deepspeed(tmp_path / "run", make_trained(), stage=2, ranks=1)
    (tmp_path / "other").mkdir()
    for name in ("..", "../run", "/etc", "a/b", "."):
        (tmp_path / "other" / "latest").write_text(name)
        with pytest.raises(CheckpointError, match="names a missing checkpoint"):
            read_deepspeed(tmp_path / "other")
    folder = write_universal(tmp_path / "universal", make_trained(), 2)
    shapes = {"../zero/scalar": (1,)}
    edit(folder / "mp_rank_00_model_states.pt", lambda state: state.update(param_shapes=[shapes]))
    with pytest.raises(CheckpointError, match="no folder zero/"):
        read_deepspeed(folder)


def edit(path, change):
    """Edit a file of DeepSpeed."""
    with deepspeed_modules():
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)
