"""Tokens per second and memory of fine-tuning: the recipe, the Trainer of transformers, and Accelerate's plain loop.

All sides train the same small Llama on the same packed rows, by LoRA and whole, are alive at once and take turns as in
docs/peers.md. No figure is printed if they fail to have the same loss at each step: they would have done other work.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.peers.environments import default_cache
from benchmarks.peers.field import OURS, SIDES, Place, Side
from benchmarks.peers.measure import Measured, measure_layout
from benchmarks.peers.race import Piece
from benchmarks.peers.task import BETAS, LR, Task
from benchmarks.quiet import silence_lightning
from benchmarks.ranks import end_on_sigterm, threads_per_rank
from benchmarks.report import Goal, finish, table_of
from trainwright import compose

KINDS = ("lora", "full")
TOLERANCE = 1e-5  # of losses of a step, relative
_NEEDED = ("accelerate", "peft", "tokenizers", "transformers")
_SCRIPTS = {"transformers + peft": "transformers_trainer.py", "Accelerate + peft": "accelerate_loop.py"}
_END = "<|endoftext|>"
_DOCS = Path(__file__).parents[1] / "docs"


def overrides(folder: Path, kind: str, task: Task, seq_len: int) -> list[str]:
    """Return the overrides of ``trainwright fit recipe=finetune`` that give the peers' workload."""
    return [
        f"adapter={'lora' if kind == 'lora' else 'none'}",
        f"module.pretrained={folder / 'base'}",
        f"module.seq_len={seq_len}",
        *("schedule=constant", "schedule.warmup=0"),
        *(f"optimizer.lr={LR}", f"optimizer.betas={list(BETAS)}"),
        "data._target_=benchmarks.peers.sides.finetune.rows_in_order.RowsInOrder",
        f"+data.count={task.batch * task.total}",
        *(f"data.path={folder / 'text.jsonl'}", f"data.cache_dir={folder}", "data.held_out=0"),
        f"max_steps={task.total}",
    ]


def prepare(folder: Path, sizes: Mapping[str, int], task: Task, seq_len: int) -> None:
    """Write the texts, the model with its tokenizer, and for the peers the initial adapter and the rows."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from benchmarks.peers.sides.finetune.rows_in_order import RowsInOrder
    from trainwright.recipes.finetune.module import FineTuneModule

    transformers.utils.logging.disable_progress_bar()
    texts = [part for file in sorted(_DOCS.glob("**/*.md")) for part in file.read_text("utf-8").split("\n\n")]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    bytewise = Tokenizer(models.BPE())
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=sizes["vocab_size"], special_tokens=[_END], show_progress=False)
    bytewise.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=_END, pad_token=_END)
    tokenizer.save_pretrained(folder / "base")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    module = FineTuneModule(
        str(folder / "base"), adapter=compose("finetune", overrides(folder, "lora", task, seq_len)).module.adapter
    )
    module.configure_model()
    module.model.save_pretrained(folder / "adapter")  # type: ignore[union-attr, operator]
    data = RowsInOrder(
        task.batch * task.total,
        path=str(folder / "text.jsonl"),
        tokenizer=folder / "base",
        seq_len=seq_len,
        held_out=0,
        cache_dir=folder,
    )
    data.prepare_data()
    data.setup("fit")
    rows = [data.train[number] for number in range(data.count)]  # type: ignore[index]
    shared = [{key: row[key] for key in ("input_ids", "position_ids", "labels")} for row in rows]
    torch.save([{**row, "shift_labels": row["labels"]} for row in shared], folder / "rows.pt")


def sides_of(folder: Path, seq_len: int) -> list[Side]:
    """The peers and ours."""

    def ours(place: Place) -> list[str]:
        options = [
            *overrides(folder, place.layout, place.task, seq_len),
            *(f"strategy={'single' if place.ranks == 1 else 'ddp'}", f"devices={place.ranks}", "accelerator=cpu"),
            *(f"micro_batch_size={place.task.batch // place.ranks}", f"global_batch_size={place.task.batch}"),
            *(f"run_dir={place.folder / 'run'}", "checkpoint=none", "report=false", "trainer.limit_val_batches=0"),
            *("monitor.progress_bar=null", "monitor.start_summary=null", "callbacks.sample.length=0"),
            "+callbacks.turns._target_=benchmarks.peers.sides.lightning_turns.TurnsCallback",
        ]
        return [sys.executable, "-m", "trainwright", "fit", "recipe=finetune", *options]

    def peer(script: str, place: Place) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={place.ranks}"]
        command = [str(SIDES / "finetune" / script), str(folder), place.layout]
        return [sys.executable, *(launcher if place.ranks > 1 else []), *command]

    peers = [
        Side(name, KINDS, partial(peer, script), lambda kind, script=script: (f"finetune/{script}",))  # type: ignore[misc]
        for name, script in _SCRIPTS.items()
    ]
    return [*peers, Side(OURS, KINDS, ours, lambda kind: ())]


def check_losses(kind: str, found: Mapping[str, Measured], steps: int) -> float:
    """Largest relative distance of a step's loss on one side from that on another.

    Raises:
        SystemExit: if a side failed, has not the loss of each step, or has other losses.
    """
    for name, measured in found.items():
        if measured.error or len(measured.losses) != steps:
            raise SystemExit(f"{kind}: {name}: {measured.error or f'{len(measured.losses)} losses of {steps} steps'}")
    at = torch.tensor([measured.losses for measured in found.values()], dtype=torch.float64)
    least, most = at.amin(0), at.amax(0)  # NaN if any is
    difference = (most - least) / least.abs()
    if not bool((difference <= TOLERANCE).all()):
        step = (~(difference <= TOLERANCE)).int().argmax().item()
        losses = dict(zip(found, at[:, int(step)].tolist(), strict=True))
        raise SystemExit(
            f"{kind}, step {step}: losses {losses} (allowed: {TOLERANCE} apart, relative). The sides did different "
            "work, so no figure is printed."
        )
    return float(difference.max())


def rows_of(kind: str, found: Mapping[str, Measured], tokens: int) -> list[dict[str, Any]]:
    """One row per side; ``ratio`` is its speed to that of the fastest peer, as median of the rounds.

    Args:
        kind: one of :data:`KINDS`.
        found: what was measured.
        tokens: of an optimizer step.
    """
    peers = [measured.pieces for name, measured in found.items() if name != OURS]

    def speed(own: list[Piece], what: str) -> float:
        rounds = ([getattr(a, what) / getattr(b, what) for a, b in zip(peer, own, strict=True)] for peer in peers)
        return round(float(min(map(median, rounds))), 3)

    return [
        {
            "trained": kind,
            "side": name,
            "tokens_per_s": round(tokens * measured.steps / median(piece.wall for piece in measured.pieces)),
            "ratio": speed(measured.pieces, "wall"),
            "cpu_ratio": speed(measured.pieces, "cpu"),
            "peak_mib": round(measured.pieces[-1].peak / 2**20),
            "start_s": round(measured.starts[0], 1),
        }
        for name, measured in found.items()
    ]


def goals_of(kind: str, rows: Sequence[Mapping[str, Any]], difference: float) -> list[Goal]:
    """At least as fast as the fastest peer, at most the memory of the smallest, equal losses."""
    ours = next(row for row in rows if row["side"] == OURS)
    least = min(row["peak_mib"] for row in rows if row["side"] != OURS)
    return [
        Goal(f"tokens per second to those of the fastest peer, {kind}", ours["ratio"], 1.0, at_least=True),
        Goal(f"peak memory to that of the smallest peer, {kind}", ours["peak_mib"] / least, 1.0),
        Goal(f"difference of losses, {kind}", difference, TOLERANCE),
    ]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune", description=__doc__.split("\n\n")[0])
    add = partial(parser.add_argument, type=int)
    add("--devices", default=1, help="processes, data-parallel (default: %(default)s)")
    add("--layers", default=4, help="blocks of the model (default: %(default)s)")
    add("--width", default=256, help="of the hidden states (default: %(default)s)")
    add("--vocabulary", default=2048, help="symbols (default: %(default)s)")
    add("--seq-len", default=256, help="tokens of a row (default: %(default)s)")
    add("--batch", default=4, help="rows of a step, over all processes (default: %(default)s)")
    add("--pieces", default=8, help="of each side (default: %(default)s)")
    add("--steps", default=2, help="optimizer steps of a piece (default: %(default)s)")
    add("--warm-up", default=2, help="optimizer steps before the first piece (default: %(default)s)")
    add("--threads", default=0, help="CPU threads of a process (default: the cores divided by the processes)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what is trained (default: all)")
    options = parser.parse_args(argv)
    if missing := [name for name in _NEEDED if not find_spec(name)]:
        parser.error(
            f"{', '.join(missing)}: not installed. Type pip install -c constraints.txt -e '.[huggingface,peft]'"
        )
    if options.batch % options.devices:
        parser.error(f"--batch {options.batch} (allowed: a multiple of --devices {options.devices})")
    return options


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    options = arguments(argv)
    end_on_sigterm()
    silence_lightning()
    task = Task(batch=options.batch, warm_up=options.warm_up, steps=options.steps, pieces=options.pieces)
    width = {"hidden_size": options.width, "intermediate_size": 2 * options.width, "num_attention_heads": 4}
    sizes = {"vocab_size": options.vocabulary, "num_hidden_layers": options.layers, **width}
    threads = options.threads or threads_per_rank(options.devices)
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory(prefix="trainwright-finetune-") as name:
        folder = Path(name)
        prepare(folder, sizes, task, options.seq_len)
        for kind in options.kinds:
            place = Place(kind, options.devices, default_cache(), folder, task)
            found = measure_layout(sides_of(folder, options.seq_len), place, threads)
            difference = check_losses(kind, found, task.total)
            ran = rows_of(kind, found, options.batch * options.seq_len)
            rows += ran
            goals += goals_of(kind, ran, difference)
    size = f"{options.layers} x {options.width}, {options.batch} rows of {options.seq_len} a step"
    title = f"Llama {size}, fp32; {options.devices} process(es), medians of {options.pieces} x {options.steps} steps"
    finish("finetune", [table_of(title, rows)], goals, {"options": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
