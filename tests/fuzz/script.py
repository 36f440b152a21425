"""Writes a program as a script of its own, from the sources of the components that it uses."""

from __future__ import annotations

import ast
import inspect
import sys
from types import ModuleType
from typing import Any

from tests.fuzz import data, losses, modules, pieces
from tests.fuzz.compare import Cell
from tests.fuzz.layouts import LAYOUTS
from tests.fuzz.program import CALLBACKS, GLOBAL_BATCH, NETWORKS, SEQUENCES, Program, trainer_options

FUTURE = "from __future__ import annotations\n"
STOPPER = ', *([] if "--resume" in sys.argv or len(sys.argv) == 1 else [Stopper({stop}, "saved_by_script")])'
RESUMABLE_FIT = """try:
    trainer.fit(module, *loaders, ckpt_path="saved_by_script" if "--resume" in sys.argv else None)
except Interrupted:
    sys.exit(print("saved"))"""
MAIN = """
def optimizers(module):
{optimizers}


def data(batch):
    samples = {kind}({size}, {padded_from}, torch.{dtype})
    held_out = {kind}(14, {held_out_from}, torch.{dtype}, 12)
    return {loader}(samples, batch), {evaluated}


class Print(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        shown = {{name: round(float(value), 7) for name, value in trainer.callback_metrics.items()}}
        ids = batch.get("a", batch)["id"].tolist()
        print(f"rank {{trainer.global_rank}}, step {{trainer.global_step}}: {{ids}} {{shown}}", flush=True)


# Strategy, options, ranks, batch size of a rank, accumulation.
LAYOUTS = {{
{layouts}
}}

layout = sys.argv[1] if len(sys.argv) > 1 else "lightning"
torch.manual_seed({seed})
module = {module}({network}, {loss}, optimizers){double}
options = dict(
    {options},
    callbacks=[{callbacks}, Print(){stopper}],
)
strategy, chosen, ranks, batch, accumulation = LAYOUTS.get(layout, ("", {{}}, 1, {whole}, {parts}))
{accumulates}
if layout == "lightning":
    trainer = pl.Trainer(devices=1, **options)
else:
    trainer = trainwright.Trainer(strategy=make_strategy(strategy, **chosen), devices=ranks, **options)
torch.manual_seed(5)
loaders = data(batch)
{fit}
weights = trainer.strategy.whole_parameters() if layout != "lightning" else module.named_parameters()
total = sum(float(weight.detach().double().abs().sum()) for _, weight in sorted(weights))
print(f"rank {{trainer.global_rank}}: sum of weights {{total:.9f}}, logged {{dict(trainer.callback_metrics)}}")
"""


def script(program: Program, cell: str) -> str:
    """Return the text of a script that runs a program: under Lightning, or under the layout that its argument names."""
    names = list(dict.fromkeys(cell.split(">")))
    network, block = NETWORKS[program.network]
    kind = data.Texts if program.network in SEQUENCES else data.Vectors
    chosen = [
        *([] if block is None else [block]),
        *(network, getattr(losses, program.loss), getattr(modules, program.module), kind),
        *(getattr(data, program.loader), data.plain, getattr(pieces, program.optimizer)),
        *([getattr(pieces, program.scheduler)] if program.scheduler else []),
        *(made for name in program.callbacks if (made := CALLBACKS[name]) in (pieces.Norms, pieces.Average)),
        *([pieces.Stopper] if ">" in cell else []),
    ]
    imports, sources = collected(chosen)
    resumes = f"; then {names[-1]} --resume" if ">" in cell else ""
    head = f'"""{cell} | {program}\n\nArguments: none (one process, Lightning), or {names[0]}{resumes}."""\n'
    imports += ["import sys", "import torch", "import trainwright", "import lightning.pytorch as pl"]
    imports += ["from trainwright.strategies.contract.registry import make_strategy"]
    return "\n".join(
        [head, FUTURE, *sorted(set(imports)), "", *sources, "", _main(program, cell, names, network, block, kind)]
    )


def _main(program: Program, cell: str, names: list[str], network: Any, block: Any, kind: Any) -> str:
    found = Cell(program, tuple(names))
    parts = 1 if found.is_whole else found.parts
    padded = None if program.padded_from < 0 else program.padded_from
    options = trainer_options(program)
    options["enable_checkpointing"] |= ">" in cell
    if program.validation == "steps":
        options["val_check_interval"] = 2
    return MAIN.format(
        optimizers=_optimizers(program),
        kind=kind.__name__,
        size=GLOBAL_BATCH * program.steps + program.rest,
        padded_from=padded,
        held_out_from=None if padded is None else 4,
        dtype="float64" if program.double else "float32",
        loader=program.loader,
        evaluated=_evaluated(program),
        layouts="\n".join(_layout(found, name) for name in names),
        seed=program.seed,
        module=program.module,
        network=f"{network.__name__}({'' if block is None else block.__name__})",
        loss=program.loss,
        double=".double()" if program.double else "",
        options=",\n    ".join(f"{name}={value!r}" for name, value in options.items()),
        callbacks=", ".join(_callback(name) for name in program.callbacks) or "",
        stopper=STOPPER.format(stop=program.stop) if ">" in cell else "",
        fit=RESUMABLE_FIT if ">" in cell else "trainer.fit(module, *loaders)",
        accumulates=_accumulates(program),
        whole=GLOBAL_BATCH // parts,
        parts=parts,
    ).replace("[, ", "[")


def _accumulates(program: Program) -> str:
    if "schedule" in program.options:
        scheduler = "pl.callbacks.GradientAccumulationScheduler({0: accumulation, 1: 2 * accumulation})"
        return f'options["callbacks"].insert(0, {scheduler})'
    by_ranks = f'options["global_batch_size"] = {GLOBAL_BATCH}' if "global_batch" in program.options else ""
    accumulates = 'options["accumulate_grad_batches"] = accumulation'
    return f'if layout != "lightning":\n    {by_ranks}\nelse:\n    {accumulates}' if by_ranks else accumulates


def _evaluated(program: Program) -> str:
    form = "plain" if program.loader in ("shuffled", "dropping") else program.loader
    made = [f"{form}(held_out, {size})" for size in (4, 3)]
    several = f"[{', '.join(made)}]" if "two_loaders" in program.options else made[0]
    return several if program.validation else "None"


def _layout(cell: Cell, name: str) -> str:
    layout, parts = LAYOUTS[name], cell.parts_under(name)
    batch, accumulation = GLOBAL_BATCH // parts, parts // layout.data_ranks
    return f"    {name!r}: ({layout.strategy!r}, {layout.options!r}, {layout.ranks}, {batch}, {accumulation}),"


def _callback(name: str) -> str:
    made: Any = CALLBACKS[name]
    if not hasattr(made, "func"):
        return f"{made.__name__}()"
    given = [*map(repr, made.args), *(f"{key}={value!r}" for key, value in made.keywords.items())]
    return f"pl.callbacks.{made.func.__name__}({', '.join(given)})"


def _optimizers(program: Program) -> str:
    lines = [f"made = {program.optimizer}(module)"]
    if not program.scheduler:
        lines.append("return made")
    else:
        call = f"{program.scheduler}(each, {program.epochs * program.per_epoch})"
        if program.optimizer == "two":
            lines.append(f"return made, [{call} for each in made]")
        else:
            lines.append(f'return {{"optimizer": made, "lr_scheduler": {call.replace("each", "made", 1)}}}')
    return "\n".join(f"    {line}" for line in lines)


def collected(chosen: list[Any]) -> tuple[list[str], list[str]]:
    """Return import lines and the sources of functions and classes, with all that these use, in an order that runs."""
    imports: list[str] = []
    constants: dict[str, str] = {}
    sources: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        module = getattr(value, "__module__", None)
        if isinstance(value, ModuleType):
            imports.append(f"import {value.__name__}" + (f" as {name}" if value.__name__ != name else ""))
        elif isinstance(value, int | str | float):
            constants[name] = f"{name} = {value!r}"
        elif module is not None and module.startswith("tests.fuzz"):
            if name not in sources:
                sources[name] = ""  # so that it is not added within itself
                text = inspect.getsource(value)
                _add_used(text, vars(sys.modules[module]), add)
                del sources[name]
                sources[name] = f"\n\n{text.rstrip()}"
        elif module is not None:
            own = getattr(value, "__name__", name)
            imports.append(f"from {module} import {own}" + (f" as {name}" if own != name else ""))

    for each in chosen:
        add(each.__name__, each)
    return imports, [*constants.values(), *sources.values()]


def _add_used(text: str, scope: dict[str, Any], add: Any) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id in scope:
            add(node.id, scope[node.id])
