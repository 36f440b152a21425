"""Rendering of page templates: each page is one file without scripts that loads nothing.

Text of runs is untrusted: templates escape every value, and the content security policy of a page forbids running or
loading anything but its own style sheet, identified by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trainwright.core.charts.drawing import amount, exact
from trainwright.core.problems import ConfigError
from trainwright.core.text.printable import printable


def render(template: str, **values: Any) -> str:
    """Render a template.

    Args:
        template: name of a file in `templates`.
        values: variables of the template.
    """
    style = files("trainwright.core.charts").joinpath("templates", "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return _environment().get_template(template).render(style=Markup(style), style_hash=digest, **values)  # noqa: S704


def write_page(page: str, file: str, option: str) -> None:
    """Write a page to the file that an option of a command names.

    Raises:
        ConfigError: if it cannot be written.
    """
    try:
        Path(file).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{option} {file}: {error.strerror}; type the path of a writable file"]) from error


def _printable(value: object) -> object:
    # Markup comes from templates, whose values are already sanitized.
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("trainwright.core.charts", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["exact"] = exact
    environment.filters["bytes"] = lambda value: amount(value, "bytes")
    environment.filters["seconds"] = lambda value: amount(value, "seconds")
    return environment
