"""Tokens per second of a layer of experts, forward and backward: the recipe's, beside a loop over experts.

The loop picks the tokens of one expert after the other, as the eager experts of transformers do. Both have the same
weights and routes; no figure is printed if outputs or gradients differ by more than rounding.
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
from benchmarks.report import Goal, finish, table_of
from trainwright.recipes.moe.model import Experts, MoEConfig

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of outputs and gradients, relative to their largest


def looped(experts: Experts, tokens_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:  # noqa: N803
    """Compute the output of ``experts`` one expert after the other."""
    out = torch.zeros_like(tokens_ND)
    for expert in index_NK.unique().tolist():
        token, place = (index_NK == expert).nonzero(as_tuple=True)
        x = tokens_ND[token]
        hidden = F.silu(F.linear(x, experts.gate[expert])) * F.linear(x, experts.up[expert])
        y = F.linear(hidden, experts.down[expert]) * weights_NK[token, place, None]
        out = out.index_add(0, token, y.to(out.dtype))
    return out


def step(layer: Any, experts: Experts, given: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """Forward and backward; the output and the gradients."""
    experts.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out = layer(*given)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in experts.parameters() if p.grad is not None)]


def seconds(layer: Any, experts: Experts, given: tuple[Tensor, ...], dtype: torch.dtype) -> float:
    """Time on the clock of one step."""
    begin = time.perf_counter()
    step(layer, experts, given, dtype)
    return time.perf_counter() - begin


def measure(dtype: torch.dtype, count: int, options: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Return the row for a number of experts, and the difference between the sides."""
    torch.manual_seed(0)
    sizes = MoEConfig(experts=count, experts_per_token=2, dim=options.width, hidden=options.hidden)
    experts = Experts(sizes)
    logits = torch.randn(options.tokens, count).topk(2)
    given = (torch.randn(options.tokens, options.width), logits.indices, logits.values.softmax(-1))
    sides = {"loop": partial(looped, experts), "recipe": experts}
    loop, recipe = (step(layer, experts, given, dtype) for layer in sides.values())
    difference = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(loop, recipe, strict=True))
    taken = alternate(
        {name: partial(seconds, layer, experts, given, dtype) for name, layer in sides.items()},
        options.repeats,
        lambda each: f"{each * 1e3:.0f} ms",
    )
    speed = {name: options.tokens / median(each) for name, each in taken.items()}
    row = {"dtype": str(dtype).removeprefix("torch."), "experts": count}
    row |= {f"{name}_tokens_per_s": round(each) for name, each in speed.items()}
    return {**row, "ratio": round(speed["recipe"] / speed["loop"], 2)}, difference


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe", description=__doc__.split("\n\n")[0])
    add = partial(parser.add_argument, type=int)
    add("--tokens", default=4096, help="of a step, each with two experts (default: %(default)s)")
    add("--width", default=256, help="of a token (default: %(default)s)")
    add("--hidden", default=256, help="width inside one expert (default: %(default)s)")
    add("--experts", nargs="+", default=[8, 32, 128], help="numbers of experts (default: %(default)s)")
    add("--repeats", default=9, help="rounds (default: %(default)s)")
    options = parser.parse_args(argv)
    rows, goals = [], []
    for dtype in (torch.float32, torch.bfloat16):
        for count in options.experts:
            row, difference = measure(dtype, count, options)
            if not difference <= TOLERANCE[row["dtype"]]:
                raise SystemExit(f"{row['dtype']}, {count} experts: outputs or gradients are {difference:.1e} apart")
            rows.append(row)
            goals.append(Goal(f"speed to that of a loop, {row['dtype']}, {count} experts", row["ratio"], 1.0, True))
    title = f"{options.tokens} tokens of width {options.width}, hidden {options.hidden}, two experts each"
    finish("moe", [table_of(title, rows)], goals, {"rows": rows})


if __name__ == "__main__":
    main()
