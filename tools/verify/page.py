"""One page for one or several verified layouts, to share: differences, reports, versions."""

import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import version

from trainwright.core.charts.html import render
from trainwright.tools.verify.report import VerifyReport


def page(reports: Sequence[tuple[str, VerifyReport]], words: Sequence[str]) -> str:
    """Return a page of HTML.

    Args:
        reports: title of each layout, such as `strategy=zero3`, and its report; at least one.
        words: the command line after `trainwright`.
    """
    first = reports[0][1]
    passed = sum(report.passed for _, report in reports)
    names = ("trainwright", "torch", "lightning")
    return render(
        "verify.html.j2",
        title=f"{first.recipe}: layouts against one process",
        summary=f"{passed} of {len(reports)} layouts train as one process does. {len(first.losses)} optimizer steps of "
        f"{first.global_batch}; precision {first.precision}.",
        tolerance=f"{first.tolerance:g}",
        rows=[_row(title, report) for title, report in reports],
        command=shlex.join(["trainwright", *words]),
        versions=", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)]),
    )


def _row(title: str, report: VerifyReport) -> dict[str, object]:
    axes = " ".join(f"{axis} {size}" for axis, size in report.layout.items())
    return {
        "layout": title or f"{report.strategy} ({axes})",
        "ranks": report.ranks,
        **{
            name: f"{max((one.difference for one in found), default=0.0):.1e}"
            for name, found in (
                ("loss", report.losses), ("gradient", report.gradients), ("parameter", report.final_parameters)
            )
        },
        "verdict": "equal" if report.start is None else f"differs {report.start.text}",
        "text": report.to_text(),
    }  # fmt: skip
