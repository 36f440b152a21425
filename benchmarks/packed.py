"""Memory and seconds of a step on packed documents: attention with a mask of all pairs, and by document.

Both sides train the same Llama on the same rows, by turns. Memory is the most bytes that all tensors have while a step
runs, the weights and their gradients included, counted in a step of its own that is not timed.
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
from benchmarks.report import Goal, finish, seconds_rows, table_of
from trainwright.recipes.hugging_face.documents import register_document_attention

MOST_TIME, MOST_MEMORY, TOLERANCE = 0.9, 1.0, 1e-5
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
    loss = F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def seconds(model: Any, *given: Any) -> float:
    """Time on the clock of one step."""
    begin = time.perf_counter()
    step(model, *given)
    return time.perf_counter() - begin


def peak(model: Any, *given: Any) -> tuple[int, float]:
    """Most bytes of tensors in a step, and its loss."""
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
    options = parser.parse_args(argv)
    model = model_of(options.width, options.layers)
    ids = torch.randint(0, _VOCABULARY, (options.rows, options.tokens))
    positions = (torch.arange(options.tokens) % options.document).expand(options.rows, -1)
    sides = {"mask of all pairs": "sdpa", "by document": register_document_attention()}
    measured = {name: peak(model, attention, ids, positions) for name, attention in sides.items()}
    taken = alternate(
        {name: partial(seconds, model, attention, ids, positions) for name, attention in sides.items()},
        options.repeats,
        lambda each: f"{each:.2f} s",
    )
    masked, separate = sides
    rows = [{**row, "MiB": round(measured[row["side"]][0] / 2**20, 1)} for row in seconds_rows(taken)]
    goals = [
        Goal("part of the time", median(taken[separate]) / median(taken[masked]), MOST_TIME),
        Goal("part of the memory", measured[separate][0] / measured[masked][0], MOST_MEMORY),
        Goal("distance of the losses", abs(measured[separate][1] - measured[masked][1]), TOLERANCE),
    ]
    title = f"{options.rows} x {options.tokens} tokens, documents of {options.document}"
    finish("packed", [table_of(title, rows)], goals, {"rows": rows})


if __name__ == "__main__":
    main()
