"""Which weights can be split over the tensor axis, read off the structure of a module where it is unmistakable.

The pattern is that of Megatron-LM (arXiv:1909.08053): projections into heads or into the wide feed-forward space are
split by columns, the projection back by rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from trainwright.strategies.plan_code import reads_of
from trainwright.strategies.plan_names import parent_of
from trainwright.strategies.tensor_rules import COUNTS_OF_HEADS, HEAD_WIDTHS

# Names under which attention keeps its projections of queries, keys, values, and back.
_ATTENTION = (
    ("q_proj", "k_proj", "v_proj", ("o_proj", "out_proj")),
    ("query", "key", "value", ("out", "output", "proj", "out_proj", "dense")),
    ("wq", "wk", "wv", ("wo",)),
    ("q", "k", "v", ("o", "out", "proj")),
    ("to_q", "to_k", "to_v", ("to_out",)),
    ("q_lin", "k_lin", "v_lin", ("out_lin",)),
    ("query_proj", "key_proj", "value_proj", ("out_proj", "output_proj")),
)
# One matrix of queries, keys and values, and the projection back.
_PACKED = ("c_attn", "qkv", "qkv_proj", "in_proj", "Wqkv", "to_qkv")
_PACKED_BACK = ("c_proj", "proj", "out_proj", "o_proj", "to_out", "out", "Wo")
# Feed-forward layers: gate, up, down.
_GATED = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate", "up", "down"),
    ("w1", "w3", "w2"),
    ("wi_0", "wi_1", "wo"),
    ("gate_linear", "up_linear", "down_linear"),
)
# Feed-forward layers: up, down.
_PLAIN = (
    ("fc1", "fc2"),
    ("linear1", "linear2"),
    ("linear_1", "linear_2"),
    ("lin1", "lin2"),
    ("c_fc", "c_proj"),
    ("fc_in", "fc_out"),
    ("up_proj", "down_proj"),
    ("up", "down"),
    ("w1", "w2"),
    ("wi", "wo"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)
_GATED_PACKED = (("gate_up_proj", "down_proj"), ("gate_up", "down"), ("w12", "w3"))

_POINTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.CELU, nn.SELU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid, nn.Dropout, nn.Identity,
)  # fmt: skip

# Attributes that measure features of all heads.
_FEATURES = (
    "split_size", "all_head_size", "embed_dim", "inner_dim", "n_embd", "hidden_size", "hidden_dim", "d_model", "dim",
    "kv_dim", "q_dim", "q_size", "kv_size", "attn_dim", "num_features",
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Weights that can only be split together.

    Args:
        styles: name of a module -> its style.
        fixed_heads: name of a module -> attributes that count heads, where the class tells them.
    """

    styles: Mapping[str, str]
    fixed_heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def features_of(module: nn.Module | None) -> tuple[int, int] | None:
    """``(inputs, outputs)`` of a linear layer, ``nn.Linear`` or Hugging Face's ``Conv1D``; ``None`` for others."""
    if isinstance(module, nn.Linear) and type(module).__name__ != "NonDynamicallyQuantizableLinear":
        return module.in_features, module.out_features
    inputs, outputs = getattr(module, "nx", None), getattr(module, "nf", None)
    if type(module).__name__ == "Conv1D" and isinstance(inputs, int) and isinstance(outputs, int):
        return inputs, outputs
    return None


def find_groups(module: nn.Module, left_alone: tuple[str, ...]) -> list[Group]:
    """Groups of weights that can be split over the tensor axis, in the order of ``named_modules``.

    Args:
        module: the whole model; its parameters may be on the meta device.
        left_alone: names of modules whose insides are not looked at (those that route to experts).
    """
    found: list[Group] = []
    taken: set[str] = set()
    for name, sub in module.named_modules():
        if any(name == outer or name.startswith(f"{outer}.") for outer in left_alone):
            continue
        prefix = f"{name}." if name else ""
        for group in _groups_of(sub, name, prefix):
            if taken.isdisjoint(group.styles):
                taken.update(group.styles)
                found.append(group)
    return found


def _groups_of(sub: nn.Module, name: str, prefix: str) -> Iterator[Group]:
    if isinstance(sub, nn.MultiheadAttention):
        if sub._qkv_same_embed_dim and sub.bias_k is None and not sub.add_zero_attn:
            styles = {name: "packed_colwise:3", f"{prefix}out_proj": "rowwise"}
            yield Group(styles, {name: ("num_heads", "embed_dim")})
        return
    if isinstance(sub, nn.Sequential):
        yield from (Group(styles) for styles in _sequence(sub, prefix))
        return
    for styles in (_attention(sub), _packed_attention(sub), _distant_attention(sub), _feed_forward(sub)):
        if styles:
            yield Group({prefix + key: style for key, style in styles.items()})


# ---- attention ----------------------------------------------------------------------------------------------------


def _attention(sub: nn.Module) -> dict[str, str]:
    for query, key, value, backs in _ATTENTION:
        shapes = [features_of(getattr(sub, part, None)) for part in (query, key, value)]
        for back in backs:
            out = features_of(getattr(sub, back, None))
            if out is None or not _are_projections(shapes, out[0]) or not _splits_heads(sub):
                continue
            if _works_by_head(sub, (query, key, value, back)):
                return {query: "colwise", key: "colwise", value: "colwise", back: "rowwise"}
    return {}


def _packed_attention(sub: nn.Module) -> dict[str, str]:
    for packed in _PACKED:
        shape = features_of(getattr(sub, packed, None))
        for back in _PACKED_BACK:
            out = features_of(getattr(sub, back, None))
            if shape is None or out is None or shape[1] != 3 * out[0] or not _splits_heads(sub):
                continue
            if _works_by_head(sub, (packed, back)):
                return {packed: "packed_colwise:3", back: "rowwise"}
    return {}


def _distant_attention(sub: nn.Module) -> dict[str, str]:
    """BERT's: one child projects to queries, keys and values, its sibling ``output`` projects back."""
    back = getattr(getattr(sub, "output", None), "dense", None)
    out = features_of(back)
    if out is None:
        return {}
    for child_name, child in sub.named_children():
        shapes = [features_of(getattr(child, part, None)) for part in ("query", "key", "value")]
        if not _are_projections(shapes, out[0]) or not _splits_heads(child):
            continue
        if _works_by_head(child, ("query", "key", "value")):
            inner = {f"{child_name}.{part}": "colwise" for part in ("query", "key", "value")}
            return {**inner, "output.dense": "rowwise"}
    return {}


def _are_projections(shapes: list[tuple[int, int] | None], back_inputs: int) -> bool:
    query, key, value = shapes
    if query is None or key is None or value is None:
        return False
    return query[1] == back_inputs and key[1] == value[1] and query[1] % key[1] == 0


def _splits_heads(sub: nn.Module) -> bool:
    """Whether its code takes the number of heads from itself or from the tensors, not from a configuration."""
    reads = reads_of(type(sub))
    from_config = [name for name in reads.config if name in COUNTS_OF_HEADS or name in _FEATURES]
    return not from_config and not any(p is not None for p in sub._parameters.values())


def _works_by_head(sub: nn.Module, projections: tuple[str, ...]) -> bool:
    """Whether further children work on one head at a time; one that mixes heads forbids to split these."""
    width = next((value for name in HEAD_WIDTHS if isinstance(value := getattr(sub, name, None), int)), None)
    others = [child for name, child in sub.named_children() if name not in projections]
    return all(width is not None and tuple(p.shape) == (width,) for child in others for p in child.parameters())


# ---- feed-forward -------------------------------------------------------------------------------------------------


def _feed_forward(sub: nn.Module) -> dict[str, str]:
    for gate, up, down in _GATED:
        shapes = [features_of(getattr(sub, part, None)) for part in (gate, up, down)]
        if _are_gated(shapes) and shapes[0] is not None and _is_clean(sub, (gate, up, down), shapes[0][1]):
            return {gate: "colwise", up: "colwise", down: "rowwise"}
    for packed, down in _GATED_PACKED:
        wide, back = features_of(getattr(sub, packed, None)), features_of(getattr(sub, down, None))
        if (
            wide is not None
            and back is not None
            and wide == (back[1], 2 * back[0])
            and _is_clean(sub, (packed, down), wide[1])
        ):
            return {packed: "packed_colwise:2", down: "rowwise"}
    for up, down in _PLAIN:
        wide, back = features_of(getattr(sub, up, None)), features_of(getattr(sub, down, None))
        if wide is not None and wide == (back or (0, 0))[::-1] and _is_clean(sub, (up, down), wide[1]):
            return {up: "colwise", down: "rowwise"}
    return _distant_feed_forward(sub) or _two_layers(sub)


def _are_gated(shapes: list[tuple[int, int] | None]) -> bool:
    gate, up, down = shapes
    return gate is not None and gate == up and down is not None and down == gate[::-1]


def _is_clean(sub: nn.Module, layers: tuple[str, ...], width: int) -> bool:
    """Whether nothing else can stand between the layers that needs all of the ``width`` features there."""
    if isinstance(sub, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return True
    children = [child for name, child in sub.named_children() if name not in layers]
    if any(isinstance(child, nn.Softmax | nn.LogSoftmax | nn.GLU) for child in children):
        return False
    simple = [child for child in children if next(child.children(), None) is None]
    own = [p for p in sub._parameters.values() if p is not None]
    return not any(width in p.shape for p in (*own, *(p for child in simple for p in child.parameters())))


def _distant_feed_forward(sub: nn.Module) -> dict[str, str]:
    """BERT's: ``intermediate.dense`` and ``output.dense``."""
    wide = features_of(getattr(getattr(sub, "intermediate", None), "dense", None))
    back = features_of(getattr(getattr(sub, "output", None), "dense", None))
    if wide is None or back is None or wide != back[::-1]:
        return {}
    return {"intermediate.dense": "colwise", "output.dense": "rowwise"}


def _two_layers(sub: nn.Module) -> dict[str, str]:
    """A module that consists of two linear layers and a pointwise one between them, whatever their names."""
    children = list(sub.named_children())
    layers = [name for name, child in children if features_of(child) is not None]
    between = [child for _, child in children if isinstance(child, _POINTWISE)]
    if len(layers) != 2 or not between or len(between) + 2 != len(children) or isinstance(sub, nn.ModuleDict):
        return {}
    wide, back = features_of(getattr(sub, layers[0])), features_of(getattr(sub, layers[1]))
    if wide is None or back is None or wide[1] != back[0]:
        return {}
    is_between = isinstance(children[[name for name, _ in children].index(layers[0]) + 1][1], _POINTWISE)
    return {layers[0]: "colwise", layers[1]: "rowwise"} if is_between else {}


def _sequence(sub: nn.Sequential, prefix: str) -> Iterator[dict[str, str]]:
    """Pairs of linear layers of a sequence with nothing but pointwise layers between them."""
    first: str | None = None
    width = 0
    for name, child in sub.named_children():
        shape = features_of(child)
        if shape is None:
            first = first if isinstance(child, _POINTWISE) else None
        elif first is not None and shape[0] == width:
            yield {prefix + first: "colwise", prefix + name: "rowwise"}
            first = None
        else:
            first, width = name, shape[1]


# ---- attributes that count heads ----------------------------------------------------------------------------------


def find_heads(module: nn.Module, tensor: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Attributes that count heads or features of what ``tensor`` splits and that are read while computing."""
    outputs: dict[str, set[int]] = {}
    for name, style in tensor.items():
        shape = features_of(module.get_submodule(name))
        if shape is None or not style.startswith(("colwise", "packed_colwise")) or style == "colwise_gather":
            continue
        sections = style.partition(":")[2]
        lengths = [int(part) for part in sections.split(",")] if sections else []
        widths = [shape[1] // lengths[0]] if len(lengths) == 1 else lengths or [shape[1]]
        outputs.setdefault(parent_of(name), set()).update(widths)
    found = {name: _counting(module.get_submodule(name), widths) for name, widths in outputs.items()}
    return {name: attributes for name, attributes in found.items() if attributes}


def _counting(sub: nn.Module, widths: set[int]) -> tuple[str, ...]:
    reads = reads_of(type(sub))
    found = []
    for name, value in vars(sub).items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            continue
        counts = name in COUNTS_OF_HEADS and (not reads.known or name in reads.attributes)
        measures = name in _FEATURES and name in reads.shaping and value in widths
        if measures or (counts and any(width % value == 0 for width in widths)):
            found.append(name)
    return tuple(found)
