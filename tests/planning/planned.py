"""Plans that several tests look at; each is made once."""

from functools import cache

from trainwright.command.schema.compose import compose
from trainwright.planning.search.plan import Plan
from trainwright.planning.search.search import plan

SMALL = ("recipe=llama_3d", "devices=8", "device=cpu", "accelerator=cpu", "global_batch_size=16")


@cache
def planned(*words: str) -> Plan:
    """The plan for these overrides."""
    return plan(compose(None, words))
