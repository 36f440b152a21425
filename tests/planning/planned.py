"""Plans shared by several tests."""

from functools import cache

from trainwright.command.schema.compose import compose
from trainwright.planning.search.plan import Plan
from trainwright.planning.search.search import plan

SMALL = ("recipe=llama_3d", "devices=8", "device=cpu", "accelerator=cpu", "global_batch_size=16")


@cache
def planned(*words: str) -> Plan:
    """Return the plan for overrides, cached."""
    return plan(compose(None, words))
