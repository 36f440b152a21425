"""Memory and seconds of a step's loss over a large vocabulary: all logits at once, and in chunks of positions.

Both sides train the same small Llama on the same batch, by turns. Memory is the most bytes that all tensors have while
a step runs, the weights and their gradients included, counted in a step of its own that is not timed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.alternate import alternate
from benchmarks.live_bytes import LiveBytes
from benchmarks.report import Goal, finish, seconds_rows, table_of
from trainwright.recipes.finetune.module import FineTuneModule

LEAST_SAVED = 0.4
TOLERANCE = 1e-5  # of losses and of gradients, the latter relative to the largest of their parameter


def module_of(folder: Path, vocabulary: int, width: int) -> FineTuneModule:
    """One block below a head of ``vocabulary`` symbols."""
    import transformers

    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": width}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.AutoConfig.for_model("llama", **sizes, **heads)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return FineTuneModule(str(folder), meta=False)


def step(module: FineTuneModule, batch: dict[str, Tensor], chunk: int) -> float:
    """Forward and backward; the loss."""
    module.loss_chunk = chunk
    module.zero_grad()
    with patch.object(module, "log"):
        loss = module.training_step(batch, 0)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def seconds(module: FineTuneModule, batch: dict[str, Tensor], chunk: int) -> float:
    """Time on the clock of one step."""
    begin = time.perf_counter()
    step(module, batch, chunk)
    return time.perf_counter() - begin


def peak(module: FineTuneModule, batch: dict[str, Tensor], chunk: int) -> tuple[int, float, list[Tensor]]:
    """Most bytes of tensors in a step, its loss and its gradients."""
    module.zero_grad()
    with LiveBytes(known=module.parameters()) as live:
        loss = step(module, batch, chunk)
    return live.peak, loss, [p.grad for p in module.parameters() if p.grad is not None]


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vocabulary", description=__doc__.split("\n\n")[0])
    add = partial(parser.add_argument, type=int)
    add("--vocabulary", default=131072, help="symbols")
    add("--tokens", default=4096, help="positions of the batch")
    add("--width", default=128, help="of the hidden states")
    add("--chunk", default=512, help="positions per chunk")
    add("--repeats", default=3, help="rounds")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="trainwright-benchmark-") as folder:
        module = module_of(Path(folder), options.vocabulary, options.width)
    ids = torch.randint(0, options.vocabulary, (4, options.tokens // 4))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": torch.arange(ids.shape[1]).expand(4, -1)}
    sides = {"all at once": 0, "in chunks": options.chunk}
    peaks, losses, gradients = {}, {}, {}
    for name, chunk in sides.items():
        peaks[name], losses[name], gradients[name] = peak(module, batch, chunk)
    plain, chunked = sides
    difference = abs(losses[plain] - losses[chunked])
    for one, other in zip(gradients[plain], gradients[chunked], strict=True):
        difference = max(difference, float((one - other).abs().max() / one.abs().max()))
    gradients.clear()
    taken = alternate(
        {name: partial(seconds, module, batch, chunk) for name, chunk in sides.items()},
        options.repeats,
        lambda each: f"{each:.2f} s",
    )
    rows = [{**row, "MiB": round(peaks[row["side"]] / 2**20)} for row in seconds_rows(taken)]
    saved, slower = 1 - peaks[chunked] / peaks[plain], median(taken[chunked]) / median(taken[plain])
    title = f"{options.tokens} tokens, {options.vocabulary} symbols, chunks of {options.chunk}: {slower:.2f} x the time"
    goals = [
        Goal("part of the memory saved", saved, LEAST_SAVED, at_least=True),
        Goal("largest distance of losses and gradients", difference, TOLERANCE),
    ]
    finish("vocabulary", [table_of(title, rows)], goals, {"rows": rows, "saved": saved, "time_ratio": slower})


if __name__ == "__main__":
    main()
