"""keys.md: every key and every choice of a run, from the typed configuration and the yaml files.

A hook of MkDocs adds it to the site, so it always matches the configuration and stands in no commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from importlib.resources import files as package_files
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from trainwright.command.help import default_choice, description_of, field_comments, in_order
from trainwright.command.schema.compose import choices_of, config_loader, group_names
from trainwright.command.verify_options import PREFIX, VerifyOptions
from trainwright.launch.schema import RunConfig

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

_HEAD = """# All keys

Every key that a run can be given, with its default and what it means: made from the typed configuration
(`launch/schema.py`) and the files of `conf/` when this site is built.
How keys, groups and recipes go together is explained in [configuration.md](configuration.md).
`trainwright fit --help` says the same of your installation, your own `--config-dir` included.
"""
_TYPES = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null", Any: "any"}
# Groups whose choices bring many keys of a recipe's or a library's own: its pages have them.
_OF_RECIPES = ("recipe", "size", "model", "device")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site: MkDocs calls this by its name."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "keys.md", content=document()))
    return files


def document() -> str:
    """The whole page."""
    loader = config_loader()
    groups = in_order(group_names(loader))
    plain = [item for item in fields(RunConfig) if item.name not in groups]
    parts = [
        _HEAD,
        "## Plain keys\n",
        _table(RunConfig, plain),
        "\nOf `trainwright verify` alone:\n",
        _table(VerifyOptions, list(fields(VerifyOptions)), f"{PREFIX}."),
        "\n## Groups\n",
        "A choice is typed as `group=choice`, its keys as `group.key=value`.",
        *(text for group in groups for text in _group(loader, group)),
    ]
    return "\n".join(parts) + "\n"


def _group(loader: ConfigLoaderImpl, group: str) -> Iterator[str]:
    yield f"\n### {group}\n"
    yield "| choice | what it is |\n|---|---|"
    default = default_choice(loader, group)
    for choice in choices_of(loader, group):
        is_default = " (default)" if choice == default else ""
        sets = _sets(group, choice)
        text = _cell(description_of(loader, group, choice))
        yield f"| `{choice}`{is_default} | {text}{f' Sets {sets}.' if sets else ''} |"
    schemas = _schemas(group)
    for schema in schemas:
        yield from _keys_of_schema(schema, group)
    if not schemas and group not in _OF_RECIPES:
        yield from _keys_of_yaml(loader, group)


# ---- groups with a type ---------------------------------------------------------------------------------------------


def _schemas(group: str) -> list[type]:
    """The types of a group, each behind those that it is built on."""
    found: list[type] = []
    for node in ConfigStore.instance().repo.get(group, {}).values():
        schema = OmegaConf.get_type(node.node)
        for cls in reversed(schema.__mro__ if schema is not None else ()):
            if is_dataclass(cls) and cls not in found:
                found.append(cls)
    return found


def _keys_of_schema(schema: type, group: str) -> Iterator[str]:
    own = [item for item in fields(schema) if item.name in schema.__annotations__ and item.name != "_target_"]
    if not own:
        return
    yield f"\n#### {_title(schema)}\n"
    above = [cls for cls in schema.__bases__ if is_dataclass(cls)]
    said = _first_line(schema).partition(": ")[2].strip()
    with_those = [f"[{_title(cls)}](#{_anchor(_title(cls))})" for cls in above if _has_keys(cls)]
    also = f"Beside these it has the keys of {' and '.join(with_those)}." if with_those else ""
    sentence = f"{said[:1].upper()}{said[1:]}" if said else ""
    yield f"{_cell(sentence)} {also}".strip() + ("\n" if sentence or also else "")
    yield _table(schema, own, f"{group}.")


def _has_keys(schema: type) -> bool:
    return any(item.name != "_target_" for item in fields(schema))


def _title(schema: type) -> str:
    """Return the overrides that select a configuration type, or its docstring."""
    words = re.match(r"`([^`]*)`", _first_line(schema))
    return f"`{words[1]}`" if words else _first_line(schema).rstrip(".")


def _first_line(schema: type) -> str:
    return (schema.__doc__ or "").partition("\n")[0].strip()


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")


def _table(schema: type, items: list[Field[Any]], prefix: str = "") -> str:
    rows = ["| key | type, default | meaning |", "|---|---|---|", *_rows(schema, items, prefix)]
    return "\n".join(rows)


def _rows(schema: type, items: list[Field[Any]], prefix: str) -> Iterator[str]:
    comments, hints = field_comments(schema), get_type_hints(schema)
    for item in items:
        hint = hints[item.name]
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _rows(hint, list(fields(hint)), f"{prefix}{item.name}.")
            continue
        meaning = _cell(comments.get(item.name, ""))
        yield f"| `{prefix}{item.name}` | {_takes(hint)}, {_default(item)} | {meaning} |"


def _takes(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_takes(option) for option in get_args(hint))
    return _TYPES.get(hint) or {list: "list", dict: "dict"}.get(get_origin(hint), "any")


def _default(item: Field[Any]) -> str:
    value = item.default if item.default_factory is NO_DEFAULT else item.default_factory()
    return "must be given" if value is NO_DEFAULT or value == MISSING else f"`{_written(value)}`"


def _written(value: Any) -> str:
    """A value as it is typed; what stands between backticks needs its bars escaped in a table alone."""
    if value is None:
        return "null"
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return text.replace("|", "\\|")


# ---- groups of files ------------------------------------------------------------------------------------------------


def _yaml_text(group: str, choice: str) -> str:
    return package_files("trainwright.conf").joinpath(group, f"{choice}.yaml").read_text(encoding="utf-8")


def _sets(group: str, choice: str) -> str:
    """Return the keys that a choice sets: plain values in full, others by name."""
    if group in _OF_RECIPES:
        return ""
    tree = yaml.safe_load(_yaml_text(group, choice)) or {}
    said = {key: value for key, value in tree.items() if key not in ("defaults", "_target_", "_partial_")}
    return ", ".join(
        f"`{key}`" if isinstance(value, dict) else f"`{key}: {_written(value)}`" for key, value in said.items()
    )


def _keys_of_yaml(loader: ConfigLoaderImpl, group: str) -> Iterator[str]:
    """The keys that the files of a group set, each once, with the comments that stand beside them."""
    rows: dict[str, str] = {}
    for choice in choices_of(loader, group):
        text = _yaml_text(group, choice)
        tree = yaml.compose(text)
        if isinstance(tree, yaml.MappingNode) and "@package" not in text:
            for key, value, comment in _leaves(tree, group, text.splitlines()):
                row = f"| `{key}` | `{value}` | {_cell(comment)} |"
                rows.setdefault(key, row)
                if comment and rows[key].endswith("|  |"):
                    rows[key] = row
    if rows:
        yield "\n| key | as the first of these choices sets it | meaning |\n|---|---|---|"
        yield from rows.values()


def _leaves(node: yaml.MappingNode, path: str, lines: list[str]) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        if key.value in ("defaults", "_target_", "_partial_"):
            continue
        here = f"{path}.{key.value}"
        if isinstance(value, yaml.MappingNode):
            yield from _leaves(value, here, lines)
            continue
        behind = lines[value.end_mark.line][value.end_mark.column :]
        written = lines[value.start_mark.line][value.start_mark.column : value.end_mark.column]
        yield here, written.replace("|", "\\|"), behind.partition("#")[2].strip()


def _cell(text: str) -> str:
    """A comment as a cell of a table: none of its signs is Markdown, and the pages that it names are links."""
    escaped = re.sub(r"([\\*_|])", r"\\\1", text).replace("<", "&lt;")
    return re.sub(r"docs/([\w\\]+\.md)", lambda match: _link(match[1].replace("\\", "")), escaped)


def _link(page: str) -> str:
    return f"[{page}]({page})"
