"""Checks of a configuration of the ``hf_causal_lm`` recipe; imports neither torch nor transformers."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainwright.recipes.data import corpus

MISSING = (
    "The recipe {recipe} needs Hugging Face transformers, which is not installed. "
    'Type: pip install "trainwright[huggingface]"'
)
BYTES = 256
# Names of the same size in model configurations.
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_POSITIONS = ("max_position_embeddings", "n_positions")
_COUNTS = (
    *_HIDDEN, *_LAYERS, *_HEADS, *_POSITIONS, "vocab_size", "num_key_value_heads", "intermediate_size", "n_inner",
    "head_dim", "num_local_experts", "num_experts_per_tok",
)  # fmt: skip


def check(config: Mapping[str, Any], num_data_ranks: int) -> list[str]:
    """Return problems of a configuration whose module is ``HuggingFaceModule`` and whose data is ``TokenCorpus``.

    Args:
        config: the composed configuration.
        num_data_ranks: ranks that read different samples.
    """
    problems = [] if (importlib.util.find_spec("transformers") is not None) else [MISSING.format(recipe=config["name"])]
    problems += _of_source(config["module"])
    problems += problems_of_sizes(config["module"])
    sizes, where = _sizes(config["module"])
    problems += _of_symbols(config["data"].get("tokenizer"), sizes.get("vocab_size"), where)
    return problems + corpus.check(config, num_data_ranks)


def _of_source(module: Mapping[str, Any]) -> list[str]:
    """Return problems of the model's source."""
    config, folder = module.get("config") or {}, module.get("pretrained")
    if folder is None:
        return _of_model_type(config.get("model_type"))
    problems = list(problems_of_folder(Path(str(folder)).expanduser(), str(folder)))
    if "model_type" in config:
        problems.append(
            f"module.pretrained={folder} and module.config.model_type={config['model_type']}: the folder defines the "
            f"model type. Type model=pretrained module.pretrained={folder}"
        )
    return problems


def _of_model_type(model_type: Any) -> list[str]:
    if model_type is None:
        return [
            "module.config.model_type and module.pretrained are both null, so there is no model. Type model=llama, or "
            "model=pretrained module.pretrained=/path/to/folder"
        ]
    known = _known_model_types()
    if not known or model_type in known:
        return []
    near = difflib.get_close_matches(str(model_type), known, 3) or ["gpt2", "llama", "mixtral", "qwen2"]
    return [
        f"module.config.model_type={model_type}: the installed transformers has no causal language model of that name. "
        f"Similar or common ones: {', '.join(near)}"
    ]


def _known_model_types() -> list[str]:
    """Return names of causal language models from the source of ``transformers``; empty if its format is unknown."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return []
    source = Path(spec.submodule_search_locations[0], "models", "auto", "modeling_auto.py")
    try:
        text = source.read_text(encoding="utf-8")
    except OSError:
        return []
    table = re.search(r"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES\s*=(.*?)^\)", text, re.DOTALL | re.MULTILINE)
    return re.findall(r'\(\s*"([^"]+)"\s*,', table[1]) if table else []


def problems_of_folder(folder: Path, given: str) -> Iterator[str]:
    """Yield problems of a folder with a model."""
    if not folder.is_dir():
        yield (
            f"module.pretrained={given}: this folder does not exist. Type one written by save_pretrained; "
            "nothing is downloaded"
        )
        return
    if not (folder / "config.json").is_file():
        yield f"module.pretrained={given}: has no config.json. Type a folder written by save_pretrained"
    if not any(folder.glob("*.safetensors")):
        yield (
            f"module.pretrained={given}: has no *.safetensors; pickled weights are not read, since loading them can "
            "run code. Save the model again with a recent transformers"
        )


def _sizes(module: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the sizes of the model by their own names, and their place in the configuration."""
    config, folder = dict(module.get("config") or {}), module.get("pretrained")
    if folder is None:
        return config, "module.config."
    try:
        saved = json.loads(Path(str(folder)).expanduser().joinpath("config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return config, "module.config."
    return {**saved, **config}, f"{folder}/config.json: "


def problems_of_sizes(module: Mapping[str, Any]) -> list[str]:
    """Return problems of the model's sizes in a module's configuration, and of its chunks."""
    sizes, where = _sizes(module)
    chunk = module.get("loss_chunk", 0)
    is_count = isinstance(chunk, int) and not isinstance(chunk, bool) and chunk >= 0
    problems = [] if is_count else [f"module.loss_chunk={chunk} (allowed: 0 = off, or positions, such as 512)"]
    return problems + _of_sizes(sizes, where, int(module["seq_len"]))


def _of_sizes(sizes: Mapping[str, Any], where: str, seq_len: int) -> list[str]:
    problems = [
        f"{where}{name}={sizes[name]} (allowed: 1 or more)"
        for name in _COUNTS
        if isinstance(sizes.get(name), int) and sizes[name] < 1
    ]
    return problems or list(_of_ratios(sizes, where, seq_len))


def _of_ratios(sizes: Mapping[str, Any], where: str, seq_len: int) -> Iterator[str]:
    hidden, heads, positions = (_first(sizes, names) for names in (_HIDDEN, _HEADS, _POSITIONS))
    groups = sizes.get("num_key_value_heads")
    experts, chosen = sizes.get("num_local_experts"), sizes.get("num_experts_per_tok")
    if hidden and heads and sizes.get("head_dim") is None and hidden % heads:
        yield f"{where}hidden_size={hidden} with {heads} heads (allowed: a multiple of the heads)"
    if heads and groups and heads % groups:
        yield f"{where}num_key_value_heads={groups} with {heads} heads (allowed: a divisor of the heads)"
    if experts and chosen and chosen > experts:
        yield f"{where}num_experts_per_tok={chosen} of {experts} experts (allowed: at most all of them)"
    if positions and seq_len > positions:
        yield (
            f"module.seq_len={seq_len}, but the model has {positions} positions. Type module.seq_len={positions}, or "
            f"give it more: module.config.max_position_embeddings={seq_len}"
        )
    if sizes.get("output_router_logits"):
        yield (
            f"{where}output_router_logits=true: the loss of this recipe is that of tokens only. Leave it out "
            "(recipe=moe balances its experts)"
        )


def _first(sizes: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((sizes[name] for name in names if isinstance(sizes.get(name), int)), None)


def _of_symbols(folder: Any, vocabulary: Any, where: str) -> Iterator[str]:
    """Yield problems of the vocabulary."""
    symbols, of_what = BYTES, "bytes of text without data.tokenizer"
    if folder is not None:
        file = Path(str(folder)).expanduser() / "tokenizer.json"
        try:
            symbols, of_what = _num_tokens(file), f"tokens of {file}"
        except (OSError, ValueError, AttributeError, TypeError) as error:
            yield (
                f"data.tokenizer={folder}: {file} cannot be read ({type(error).__name__}). Type a folder of a fast "
                "tokenizer of Hugging Face, or null for bytes"
            )
            return
    if isinstance(vocabulary, int) and 0 < vocabulary < symbols:
        yield (
            f"{where}vocab_size={vocabulary}, but there are {symbols} {of_what}. Type "
            f"module.config.vocab_size={symbols}"
        )


def _num_tokens(file: Path) -> int:
    """Return one more than the highest id of a ``tokenizer.json``."""
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"].get("vocab") or {}
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max([*ids, *(token["id"] for token in content.get("added_tokens", []))], default=-1) + 1
