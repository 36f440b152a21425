"""Lazy loading of tools by name: no package below `tools` imports one."""

from __future__ import annotations

import importlib
from typing import Any

_TOOLS = {
    "checkpoint": "trainwright.tools.checkpoints.command:run_checkpoint_command",
    "report": "trainwright.tools.report.command:run_report_command",
    "watch": "trainwright.tools.report.command:run_report_command",
    "doctor": "trainwright.tools.doctor.command:run_doctor_command",
    "profile": "trainwright.tools.doctor.command:run_doctor_command",
    "import-deepspeed": "trainwright.tools.deepspeed.command:run_import_command",
    "generate": "trainwright.tools.generate.command:run_generate_command",
    "new": "trainwright.tools.new.command:run_new_command",
    "schema": "trainwright.tools.schema:run_schema_command",
    "verify": "trainwright.tools.verify.verify:run_verify_command",
    "expand": "trainwright.tools.deepspeed.expand:expand",
    "write_report": "trainwright.tools.report.command:write_report",
}


def tool(name: str) -> Any:
    """Return the function behind a verb, or one that several packages call.

    Args:
        name: a verb with its own folder, ``"expand"`` (of a DeepSpeed JSON) or ``"write_report"``.
    """
    module, _, function = _TOOLS[name].partition(":")
    return getattr(importlib.import_module(module), function)
