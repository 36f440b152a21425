import pytest

from trainwright.command import run
from trainwright.command.schema.compose import compose_checked

TABLES = "strategy.placement={embedding.*:parameter_server,*:shard}"


def problems(*overrides: str, strategy: str = "hybrid") -> list[str]:
    given = ["recipe=wide_deep", f"strategy={strategy}", "devices=2", "accelerator=cpu", *overrides]
    result = compose_checked(given)
    assert result.cfg is not None
    return [*result.problems, *run.plan(result.cfg, "fit", None)[1]]


def test_tables_can_be_on_servers() -> None:
    assert problems(TABLES, "strategy.table_servers=2", "strategy.stage=2") == []
    replicated = "strategy.placement={embedding.*:parameter_server,*:replicate}"
    assert problems(replicated, "strategy.shard=1", "strategy.replicate=-1", "module.sparse=true") == []


@pytest.mark.parametrize(("overrides", "said"), [
    (
        ["strategy.placement={embedding.*:server}"],
        "server: unknown; allowed are parameter_server, shard, replicate",
    ),
    (["strategy.placement={*:shard}"], "assigns nothing to parameter_server"),
    (["strategy.placement={*:parameter_server}"], "type strategy=parameter_server"),
    (
        ["strategy.placement={embedding.*:parameter_server,*:replicate}"],
        "type strategy.shard=1 strategy.replicate=-1",
    ),
    (["strategy.placement={e*:parameter_server,d*:shard,*:replicate}"], "both shard and replicate"),
    ([TABLES, "strategy.table_servers=3"], "table_servers=3 with 2 rank(s)"),
    ([TABLES, "strategy.table_servers=0"], "whole number of at least 1"),
    (["strategy.table_servers=2"], "without strategy.placement has no effect"),
    ([TABLES, "compression=int8", "strategy.stage=2"], "compression=int8"),
    ([TABLES, "launch=resilient", "launch.recovery=replicas"], "type launch.recovery=restart"),
])  # fmt: skip
def test_what_tables_on_servers_cannot_is_refused_before_a_process_starts(overrides: list[str], said: str) -> None:
    found = problems(*overrides)
    assert any(said in each for each in found), found


def test_ranks_that_step_alone_have_no_tables_on_servers() -> None:
    assert "placement with local updates" in " ".join(problems(TABLES, strategy="local_sgd"))
