"""Lost and joining replicas while the surviving processes keep training."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.faults.recipes import write_recipe
from tests.faults.survivors import RECIPE, STEPS, Survived
from trainwright.core.failures.failure import RankError

# The module records what its step reads, which a certificate would read once more.
HYBRID = ("strategy=hybrid", "strategy.certificate=off", "strategy.replicate=2", "devices=4", "module.full=4")
LAYOUTS = {
    "ddp": ("strategy=ddp", "devices=3", "module.full=3"),
    "shard": (*HYBRID, "strategy.shard=2", "micro_batch_size=1"),
    "pipeline": (*HYBRID, "strategy.pipeline=2"),
}
# The ranks of these runs are forked from the server of the suite too.
pytestmark = pytest.mark.usefixtures("ranks")
RESILIENT = ("launch=resilient", "launch.recovery=replicas", "launch.backoff_seconds=0", "module.sleep=0.5")


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("survivor"), "survivor", RECIPE)


@pytest.fixture(scope="module")
def undisturbed(conf: Path) -> Survived:
    return Survived(conf, conf.parent / "undisturbed", "strategy=single", "devices=1")


@pytest.mark.thorough
@pytest.mark.parametrize(("layout", "faults"), [
    ("ddp", ["kill(rank=0, at_step=5)", "kill(rank=2, at_step=15)"]),
    ("shard", ["kill(rank=1, at_step=10)"]),
    ("pipeline", ["kill(rank=3, at_step=10)"]),
    ("ddp", ["partition(ranks=[1], at_step=5)", 'raise_in("on_before_optimizer_step", rank=2, at_step=15)']),
])  # fmt: skip
def test_survivors_train_like_an_undisturbed_run(conf, undisturbed, tmp_path, layout, faults):
    run = Survived(conf, tmp_path / "run", *LAYOUTS[layout], *RESILIENT, f"+inject=[{', '.join(faults)}]")
    assert run.log.count("resuming from step") >= len(faults), run.log
    assert any(words in run.log for words in ("with 1 of 2 replicas", "with 2 of 3 replicas", "connections")), run.log
    assert "joined" in run.log
    assert run.read == undisturbed.read
    assert list(run.losses) == list(range(STEPS))
    assert run.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    expected = undisturbed.ends()[0]["whole"]
    assert [end for end in run.ends() if end["rank"]["pipeline"] == 0 and end["whole"]]
    assert len({str(end["whole"]) for end in run.ends() if end["rank"]["pipeline"] == 0 and end["whole"]}) == 1
    for name, values in run.ends()[0]["whole"].items():
        assert values == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    by_place = defaultdict(list)
    for end in run.ends():
        by_place[end["rank"]["pipeline"], end["rank"]["shard"]].append(end["own"])
    for copies in by_place.values():
        assert len(copies) > 1
        assert all(copy == copies[0] for copy in copies), "replicas differ"


def test_a_spare_takes_the_place_at_once(conf, undisturbed, tmp_path):
    words = (*LAYOUTS["ddp"], *RESILIENT, "launch.spares=1", "+inject=kill(rank=1, at_step=10)")
    run = Survived(conf, tmp_path / "run", *words)
    assert run.log.count("resuming from step") == 1
    assert "with 3 of 3 replicas" in run.log
    assert run.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    assert run.read == undisturbed.read


@pytest.mark.thorough
def test_a_repeated_fault_ends_the_run(conf, tmp_path):
    fault = 'raise_in("on_train_batch_end", rank=1, at_step=6, times=None)'
    with pytest.raises(RankError, match="crash loop") as error:
        Survived(conf, tmp_path / "run", *LAYOUTS["ddp"], *RESILIENT, "module.sleep=0", f"+inject={fault}")
    assert "on_train_batch_end" in str(error.value)


@pytest.mark.thorough
def test_replicas_with_local_updates_continue_from_the_same_common_parameters(conf, tmp_path):
    words = ("strategy=diloco", "strategy.sync_every=8", "devices=3", "module.full=3", *RESILIENT, "launch.mtbf=1e-6")
    run = Survived(conf, tmp_path / "run", *words, "+inject=kill(rank=1, at_step=12)")
    assert "rank 1 was ended by SIGKILL" in run.log
    assert "with 2 of 3 replicas" in run.log
    assert "1 replica(s) joined" in run.log
    assert list(run.losses) == list(range(STEPS))
    held = run.common
    for (generation, step), ranks in held.items():
        assert len({(common, momentum) for common, momentum, _ in ranks}) == 1, (generation, step)
        if step % 8 == 0:
            assert len({own for _, _, own in ranks}) == 1, (generation, step)
    for generation in (1, 2):
        step = min(at for it, at in held if it == generation)
        before = max(at for it, at in held if it == generation - 1 and at <= step)
        if before // 8 == step // 8:  # else they synchronized in between
            assert held[generation, step][0][:2] == held[generation - 1, before][0][:2]
    assert {end["rank"]["replicate"] for end in run.ends()} == {0, 1, 2}
    first, *others = (end["own"] for end in run.ends())
    assert all(other == first for other in others), "replicas end with the mean of all"
