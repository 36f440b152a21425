"""Memory and seconds of a step on packed documents: attention with a mask of all pairs, and by document.

Both sides train the same Llama on the same rows, by turns. Memory is the most bytes that all tensors have while a step
runs, the weights and their gradients included, counted in a step of its own that is not timed; on a GPU in bf16, what
its allocator counts.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.alternate import alternate
from benchmarks.live_bytes import LiveBytes
from benchmarks.report import Goal, finish, table_of
from trainwright.recipes.hugging_face.causal_lm import register_document_attention

MOST_TIME, MOST_MEMORY = 0.9, 1.0
# By device: in fp32 on the CPU, in bf16 on a GPU.
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-3}
_VOCABULARY = 256


def model_of(width: int, layers: int) -> Any:
    """A Llama with heads of 64 features."""
    import transformers

    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64, "num_hidden_layers": layers}
    sizes = {"vocab_size": _VOCABULARY, "hidden_size": width, "intermediate_size": 2 * width}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **sizes, **heads))


def step(model: Any, attention: str, ids: Tensor, positions: Tensor) -> float:
    """Forward and backward; the loss."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1, 1).flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def seconds(model: Any, *given: Any) -> float:
    """Time on the clock of one step, which ends by reading the loss."""
    begin = time.perf_counter()
    step(model, *given)
    return time.perf_counter() - begin


def peak(model: Any, *given: Any) -> tuple[int, float]:
    """Most bytes of tensors in a step, and its loss."""
    if model.device.type == "cuda":
        step(model, *given)
        torch.cuda.reset_peak_memory_stats()
        loss = step(model, *given)
        return torch.cuda.max_memory_allocated(), loss
    with LiveBytes(known=model.parameters()) as live:
        loss = step(model, *given)
    return live.peak, loss


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed", description=__doc__.split("\n\n")[0])
    add = partial(parser.add_argument, type=int)
    add("--tokens", default=4096, help="positions of a row")
    add("--document", default=512, help="positions of a document")
    add("--rows", default=1, help="of the batch")
    add("--width", default=256, help="of the hidden states")
    add("--layers", default=2, help="of the model")
    add("--repeats", default=3, help="rounds")
    parser.add_argument("--device", choices=tuple(TOLERANCE), default="cpu", help="cuda computes in bf16")
    options = parser.parse_args(argv)
    model = model_of(options.width, options.layers).to(options.device)
    if options.device == "cuda":
        model.bfloat16()
    ids = torch.randint(0, _VOCABULARY, (options.rows, options.tokens), device=options.device)
    positions = (torch.arange(options.tokens, device=options.device) % options.document).expand(options.rows, -1)
    sides = {"mask of all pairs": "sdpa", "by document": register_document_attention()}
    measured = {name: peak(model, attention, ids, positions) for name, attention in sides.items()}
    taken = alternate(
        {name: partial(seconds, model, attention, ids, positions) for name, attention in sides.items()},
        options.repeats,
        lambda each: f"{each:.2f} s",
    )
    masked, separate = sides
    rows = [
        {
            "side": side,
            "ms": round(median(taken[side]) * 1e3, 1),
            "least": round(min(taken[side]) * 1e3, 1),
            "most": round(max(taken[side]) * 1e3, 1),
            "MiB": round(measured[side][0] / 2**20, 1),
        }
        for side in sides
    ]
    goals = [
        Goal("part of the time", median(taken[separate]) / median(taken[masked]), MOST_TIME),
        Goal("part of the memory", measured[separate][0] / measured[masked][0], MOST_MEMORY),
        Goal("distance of the losses", abs(measured[separate][1] - measured[masked][1]), TOLERANCE[options.device]),
    ]
    title = f"{options.rows} x {options.tokens} tokens, documents of {options.document}"
    finish("packed", [table_of(title, rows)], goals, {"rows": rows})


if __name__ == "__main__":
    main()
