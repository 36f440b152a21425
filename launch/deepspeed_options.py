"""Options of ``strategy=deepspeed_json``."""

from dataclasses import dataclass

from trainwright.strategies.contract.options import MISSING


@dataclass
class DeepSpeedJSONOptions:
    """`strategy=deepspeed_json`: put in place of it is what a DeepSpeed JSON stands for, see docs/deepspeed.md."""

    _target_: str = "trainwright.tools.deepspeed.expand.not_expanded"
    # Path of the JSON.
    path: str | None = MISSING
