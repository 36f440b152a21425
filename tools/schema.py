"""The verb `schema`: print the JSON Schema of a recipe's yaml, made from the typed configuration and the groups."""

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from trainwright.command.arguments import Parser
from trainwright.command.help import description_of, field_comments
from trainwright.command.schema.compose import choices_of, config_loader, group_names
from trainwright.core.config.options import REFERENCE, json_schema
from trainwright.launch.schema import RunConfig
from trainwright.tools.verb import OK, run_verb

HELP = """trainwright schema: print the JSON Schema (draft 2020-12) of a recipe's yaml, for editors.

usage: trainwright schema [--config-dir DIR]

  --config-dir DIR    also allow the recipes, groups and choices in DIR
"""


def run_schema_command(words: Sequence[str]) -> int:
    """Print the schema as one JSON document.

    Args:
        words: the command line after `trainwright`, `schema` included.

    Returns:
        The exit code: 0 success, 2 the command line was refused.
    """
    return run_verb("schema", words, HELP, _print, bare=True)


def _print(words: Sequence[str]) -> int:
    parser = Parser("schema")
    parser.add_argument("--config-dir", "-cd")
    print(json.dumps(recipe_schema(config_loader(parser.parse_args(words).config_dir)), indent=1, allow_nan=False))
    return OK


def recipe_schema(loader: ConfigLoaderImpl) -> dict[str, Any]:
    """Return the JSON Schema: the defaults list, plain keys, and the keys that any choice of a group has.

    Args:
        loader: finds groups and choices.
    """
    schema, stored = _mapping([RunConfig]), ConfigStore.instance().repo
    keys, groups = schema["properties"], group_names(loader)
    for key in keys.keys() & stored.keys():
        keys[key].update(anyOf=[_mapping([OmegaConf.get_type(each.node) for each in stored[key].values()]), REFERENCE])
    places = {group: {"$ref": f"#/$defs/{group.replace('/', '~1')}"} for group in groups}
    named = {f"{word}/{group}": places[group] for word in ("", "override ", "optional ") for group in groups}
    # A key with @ places a group elsewhere.
    choice = {"type": "object", "properties": named, "patternProperties": {"@": {}}, "additionalProperties": False}
    text = {"type": "string", "anyOf": [places["recipe"], {"pattern": "^(_self_|/.+)$"}]}
    keys["defaults"] = {"description": "Choices of groups.", "type": "array", "items": {"anyOf": [text, choice]}}
    reference = {"description": "${another.key}, or ??? for a value that must be given.", "pattern": r"\$\{|^\?\?\?$"}
    definitions = {**{group: _choices(loader, group) for group in groups}, "reference": {"type": "string", **reference}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": definitions}


def _choices(loader: ConfigLoaderImpl, group: str) -> dict[str, Any]:
    found = [{"const": name, "description": description_of(loader, group, name)} for name in choices_of(loader, group)]
    return {"anyOf": [*found, {"type": ["array", "null"]}, REFERENCE]}


def _mapping(types: Sequence[Any]) -> dict[str, Any]:
    """Return the schema of a mapping whose keys are fields of any of some dataclasses."""
    found: dict[str, list[dict[str, Any]]] = {}
    for schema in types:
        comments, hints = field_comments(schema), get_type_hints(schema)
        defaults: Any = OmegaConf.to_container(OmegaConf.structured(schema))
        for item in fields(schema):
            hint, usual = hints[item.name], defaults[item.name]
            key = {"anyOf": [_mapping([hint]), REFERENCE]} if is_dataclass(hint) else json_schema(item, hint)
            key |= {"description": comments[item.name]} if item.name in comments else {}
            key |= {} if usual == MISSING else {"default": usual}
            found[item.name] = [*(other for other in found.get(item.name, []) if other != key), key]
    keys = {name: each[0] if len(each) == 1 else {"anyOf": each} for name, each in found.items()}
    return {"type": "object", "properties": keys, "additionalProperties": False}
