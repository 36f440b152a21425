"""Layouts that the planner ranks and refuses."""

import dataclasses

import pytest

from tests.planning.planned import SMALL, planned
from trainwright.command.run import plan as checked
from trainwright.command.schema.compose import compose
from trainwright.core.device_profiles import profile_named

# Model size, devices, profile, precision, global batch, axes of published runs.
PUBLISHED: dict[str, tuple[str, int, str, str, int, dict[str, int]]] = {
    # Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
    # (arXiv:2104.04473), table 1: tensor 8 x pipeline 64 for 1 T parameters on 3072 A100 with a batch of 3072 (data 6).
    "Megatron, 1 T": ("1t", 3072, "a100_80", "bf16-mixed", 3072, {"tensor": 8, "pipeline": 64, "context": 1}),
    # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 5: FSDP 8, TP 8, PP 8 with a batch of 256 and full
    # checkpointing, on H100 of 96 GB; the same without a pipeline is its 2D layout (table 4, of 70 G).
    "torchtitan, 405 G, 2D": ("405b", 512, "h100", "bf16-true", 256, {"tensor": 8, "pipeline": 1, "shard": 64}),
    "torchtitan, 405 G, 3D": ("405b", 512, "h100", "bf16-true", 256, {"tensor": 8, "pipeline": 8, "shard": 8}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_layouts_are_in_the_better_half(name: str) -> None:
    size, devices, device, precision, batch, axes = PUBLISHED[name]
    found = planned(
        "recipe=llama_3d", f"size={size}", f"devices={devices}", f"device={device}", f"precision={precision}",
        f"global_batch_size={batch}",
    )  # fmt: skip
    places = [i for i, each in enumerate(found.ranked) if axes.items() <= dataclasses.asdict(each.layout).items()]
    assert places, f"{axes} is not possible"
    assert places[0] < len(found.ranked) / 2, (places[0], len(found.ranked))


@pytest.mark.thorough
def test_layouts_are_ranked_and_unique() -> None:
    found = planned(*SMALL)
    seconds = [each.time.total for each in found.ranked]
    assert seconds == sorted(seconds)
    assert len({(each.layout, each.work.stage, each.strategy) for each in found.ranked}) == len(found.ranked)
    assert {each.strategy for each in found.ranked} >= {"ddp", "zero1", "zero2", "zero3", "hybrid"}
    for each in found.ranked:
        assert each.layout.world_size == 8
        assert each.work.micro_batch * each.work.parts * each.work.rounds * each.layout.data_ranks == 16


@pytest.mark.thorough
def test_possible_layouts_pass_the_checks_of_a_run() -> None:
    found = planned(*SMALL)
    chosen = [*found.ranked[::9], *(each for each in found.ranked if each.work.has_pipeline)][:8]
    for each in chosen:
        cfg = compose(None, [*SMALL, *each.overrides])
        assert checked(cfg, "fit")[1] == [], each.overrides


@pytest.mark.thorough
def test_refusals_are_those_of_a_run() -> None:
    """A run with the same overrides is refused with the same message."""
    found = planned("recipe=llama_3d", "devices=24", "device=cpu", "accelerator=cpu", "global_batch_size=16")
    judged = [each for each in found.refused if each.kind in ("layout", "batch")]
    assert {each.kind for each in judged} == {"layout", "batch"}
    for each in judged[::3][:8]:
        words = sorted(each.overrides, key=lambda word: word.startswith("micro_batch_size"))
        problems = checked(compose(None, ["recipe=llama_3d", "devices=24", "accelerator=cpu",
                                          "global_batch_size=16", *words]), "fit")[1]  # fmt: skip
        assert any(each.reason in problem for problem in problems), (each, problems)


@pytest.mark.thorough
def test_refusal_for_memory() -> None:
    found = planned("recipe=gpt", "size=7b", "module.meta=true", "devices=2", "device=l40s", "precision=bf16-mixed")
    (ddp,) = (each for each in found.refused if each.what.startswith("ddp"))
    assert ddp.kind == "memory"
    assert "GiB per rank at least (parameters 26.0, gradients 26.0, optimizer 52.0" in ddp.reason
    assert f"device=l40s has {0.92 * profile_named('l40s').memory_bytes / 2**30:.1f} GiB" in ddp.reason
    assert all(each.memory.total < 0.92 * found.profile.memory_bytes for each in found.ranked)


def test_one_device() -> None:
    found = planned("recipe=gpt", "device=cpu", "accelerator=cpu")
    assert [each.strategy for each in found.ranked] == ["single"]
    assert found.best is not None
    assert "strategy=single" in found.best.overrides


@pytest.mark.thorough
def test_more_memory_keeps_layouts_possible() -> None:
    words = [word for word in SMALL if not word.startswith("devices")]
    few = planned(*words, "devices=4", "device.memory_bytes=24000000")
    many = planned(*words, "devices=4")
    assert {each.title for each in few.ranked} < {each.title for each in many.ranked}
    assert {each.kind for each in few.refused} >= {"memory"}
