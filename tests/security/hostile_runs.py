"""Run directories as an attacker or a failing disk would write them."""

import json
import os
import random
from pathlib import Path
from typing import Any

from tests.tools.report.runs import CONFIG, records_of

ESCAPES = (
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x9b31mC1",
    "\x9d0;C1 OSC\x9c",
    "over\rwritten",
    "\x1bP+q544e\x1b\\",
    "a\x08\x08\x7f",
    "\u202egnp.exe",
    "\u2066isolate\u2069",
    "\x1b",
    "two\nlines\ttab",
    "zero\u200bwidth\ufeff",
    "\u2028line",
    "\U000e0041tag",
)
# Stand for what `json.dumps` cannot write.
_DIGITS, _DEEP = "@digits@", "@deep@"
NUMBERS = (1e308, -1e308, 5e-324, -5e-324, 1e100, float("nan"), float("inf"), float("-inf"), 10**400, -1, 0, -0.0)
DATES = ("9999-99-99T99:99:99", "0001-01-01T00:00:00", "9999-12-31T23:59:59-23:59", "2024-02-30")
TEXTS = ("", "²", "٣", "nan", "1e400", "9" * 5000, "x" * 200_000, "\ud800", "\x00", "{{ 7*7 }}", _DIGITS, _DEEP)
OTHERS = (True, None, [], {}, [[]], [1, "a", None], {"a": {"b": 1}})
JUNK: tuple[Any, ...] = (*ESCAPES, *NUMBERS, *DATES, *TEXTS, *OTHERS)
YAML = (
    "!!timestamp x", "!!int ''", "!!bool x", "!!python/object/apply:os.system [id]", "2001-99-99", "*a", "&a 1",
    "9" * 5000, "190" + ":59" * 3000, "[" * 200, "\x00", "\x1b[31m", ".inf", "1e308", "-1", "0x" + "f" * 5000,
    "? [a]", "<<: 1", "'\\ud800'", '"\\ud800"', "99999999999999999999", "true",
)  # fmt: skip
CELLS = ("1e308", "-1e308", "5e-324", "0", "inf", "nan", "9" * 5000, "", "x", "1e400", "-1", "\x1b[31m", '"', "1.5")
RESTARTS = ("restart 1", "resuming from step", "died at step")
RESTART_DATES = (
    "2027-01-15 08:05:00.250",
    "2027-99-15 08:05:00",
    "0001-01-01 00:00:00",
    "9999-12-31 23:59:59",
    "2027-01-15 25:61:61",
)
FILES = (
    "config.yaml", "metrics.csv", "command.json", "plan.json", "logs/restarts.log", "monitor/rank_0.jsonl",
    "monitor/rank_1.jsonl", "checkpoints/step=10/manifest.json",
)  # fmt: skip
_PLAN = {
    "chosen": {
        "bytes": {"parameters": 3e6, "gradients": 1e6, "optimizer": 2e6, "activations": 0, "buffers": 0},
        "seconds": {"step": 0.5},
    }
}
_ABOUT = {
    "step": 10, "bytes": 4096, "created": "2027-01-15T08:01:00+00:00", "kind": "run state", "versions": {"torch": "2"},
    "layout": {"pipeline": 2, "replicate": 1, "shard": 2, "context": 1, "tensor": 1, "expert": 1},
}  # fmt: skip


def text_of(document: Any) -> str:
    """JSON, with what no program would write."""
    text = json.dumps(document, ensure_ascii=random.random() < 0.5)
    text = text.replace(f'"{_DIGITS}"', "9" * 4300).replace(_DIGITS, "9" * 5000)
    deep = 900 if random.random() < 0.5 else 50_000
    return text.replace(f'"{_DEEP}"', "[" * deep + "]" * deep)


def spoiled(value: Any, chance: random.Random, share: float = 0.15) -> Any:
    """The same document with junk in places."""
    if chance.random() < share:
        return chance.choice(JUNK)
    if isinstance(value, dict):
        return {
            (chance.choice(ESCAPES) if chance.random() < share / 4 else key): spoiled(each, chance, share)
            for key, each in value.items()
        }
    return [spoiled(each, chance, share) for each in value] if isinstance(value, list) else value


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))


def hostile_run(path: Path, chance: random.Random) -> None:
    """Write a run directory with junk in every file."""
    path.mkdir()
    write(path / "config.yaml", _config(chance))
    write(path / "metrics.csv", _metrics(chance))
    write(path / "command.json", text_of(spoiled({"words": ["fit", "recipe=gpt", "seed=7"]}, chance)))
    write(path / "plan.json", text_of(spoiled(_PLAN, chance)))
    write(path / "checkpoints" / "step=10" / "manifest.json", text_of(spoiled({"about": _ABOUT}, chance)))
    write(path / "logs" / "restarts.log", "".join(_restart(chance) + "\n" for _ in range(4)))
    for rank in range(chance.randint(0, 3)):
        records = [spoiled(record, chance, 0.05) for record in [*records_of(rank), _event(chance)]]
        write(path / "monitor" / f"rank_{rank}.jsonl", "".join(text_of(record) + "\n" for record in records))
    if chance.random() < 0.3:
        _damage(path / chance.choice(FILES), chance)


def _event(chance: random.Random) -> dict[str, Any]:
    return {"time": 1.8e9, "step": 3, "kind": "event", "what": chance.choice(ESCAPES), "text": chance.choice(ESCAPES)}


def _config(chance: random.Random) -> str:
    lines = CONFIG.splitlines()
    for _ in range(chance.randint(0, 3)):
        at = chance.randrange(len(lines))
        junk = chance.choice(YAML)
        lines[at] = f"{lines[at].split(':')[0]}: {junk}"
    return "\n".join(lines) + "\n"


def _metrics(chance: random.Random) -> str:
    head = ["loss", "val_loss", "samples_per_second", "step_seconds", "norm/grad/a", "norm/param/a", "epoch"]
    head = [chance.choice(ESCAPES).replace("\n", "") if chance.random() < 0.1 else name for name in head]
    rows = [[chance.choice(CELLS) if chance.random() < 0.4 else "2.5" for _ in head] for _ in range(12)]
    steps = [chance.choice(CELLS) if chance.random() < 0.2 else str(number) for number in range(12)]
    lines = [",".join([*head, "step"]), *(",".join([*row, step]) for row, step in zip(rows, steps, strict=True))]
    return "\n".join(lines) + "\n"


def _restart(chance: random.Random) -> str:
    said = f"{chance.choice(RESTARTS)}={'9' * 5000} {chance.choice(ESCAPES)}"
    return f"{chance.choice(RESTART_DATES)} {said}"


def _damage(path: Path, chance: random.Random) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    kind = chance.randrange(4)
    if kind == 0:
        path.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif kind == 1:
        path.write_bytes(chance.randbytes(3000))
    elif kind == 2:
        os.mkfifo(path)
    else:
        path.mkdir()
