"""Every code block of the documentation is run, or composed and checked as the command line does.

Python is executed, on as many ranks as it asks for. Of shell, every command is given to what checks it before anything
is started (`commands.py`). Of yaml, what its mark says is composed. JSON is read. Marks: see `blocks.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir

from tests.docs.blocks import LANGUAGES, SHELL, Block, blocks_of, hidden_commands, pages, parse
from tests.docs.blocks import ROOT as REPOSITORY
from tests.docs.commands import configured, problems_of
from tests.docs.executed import run_blocks, run_script
from tests.docs.project import MODEL, leave_behind, write_language_model, write_project, write_runs
from tests.docs.shell import commands_of, sbatch_options
from trainwright.command.schema.compose import compose_checked
from trainwright.core.processes import machine
from trainwright.launch.engines import engines

MOST_RANKS = 4
NOT_HERE = ("not run", "in snippets")
_CHECKED: set[tuple[str, ...]] = set()


def having(*languages: str) -> list[str]:
    """Pages with a block of one of these languages that is not marked as one that cannot run."""
    return [
        page for page in pages() if any(b.language in languages and b.mark not in NOT_HERE for b in blocks_of(page))
    ]


def called_scripts(page: str) -> set[str]:
    """Scripts that a page shows and calls with `python`."""
    blocks = blocks_of(page)
    shell = "".join(block.text for block in blocks if block.language in SHELL and block.mark != "not run")
    shown = {block.value for block in blocks if block.mark == "file" and block.language == "python"}
    return {path for path in shown if re.search(rf"\bpython3? {re.escape(path)}", shell)}


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make the folder of a reader of a page, on a machine that has what the page needs."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(REPOSITORY))  # python -m benchmarks.overhead
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    for kind, entry in engines._ENGINES.items():
        monkeypatch.setitem(engines._ENGINES, kind, dataclasses.replace(entry, packages=()))
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *more, **others: which(name, *more, **others) or f"/bin/{name}")

    def follow(page: str) -> Path:
        files = {block.value: block.text for block in blocks_of(page) if block.mark == "file"}
        write_project(tmp_path, files)
        write_runs(tmp_path)
        if any(MODEL in block.text for block in blocks_of(page)):
            write_language_model(tmp_path / MODEL, tmp_path / "my_texts" / "one.txt")
        if "make_data.py" in files:  # what this file and the commands behind it make
            for name in ("tokenizer", "base"):
                write_language_model(tmp_path / name, tmp_path / "my_texts" / "one.txt")
            shutil.copy(tmp_path / "chats.jsonl", tmp_path / "chat.jsonl")
        return tmp_path

    return follow


# ---- nothing escapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages())
def test_every_block_says_what_it_is(page: str) -> None:
    unknown = [f"{block.place}: {block.language}" for block in blocks_of(page) if block.language not in LANGUAGES]
    assert not unknown, f"no test knows these languages; known: {', '.join(filter(None, LANGUAGES))}"
    assert not hidden_commands(page, (REPOSITORY / page).read_text(encoding="utf-8"))
    without = [block.place for block in blocks_of(page) if block.language == "yaml" and not block.mark]
    assert not without, "say what a yaml block is, in a comment above it: <!-- file: my_conf/recipe/mine.yaml -->"


def test_blocks_are_seen() -> None:
    text = (
        "a\n\n<!-- not run: because -->\n```bash\nmake a\n```\n\n- b\n\n  ```python\n  c = 1\n  ```\n"
        "\n```\ntrainwright fit recipe=gpt\n```\n\n    $ torchrun a\n"
    )
    first, second, third = parse("p.md", text)
    assert (first.language, first.mark, first.value, first.text) == ("bash", "not run", "because", "make a\n")
    assert (second.place, second.text, second.mark) == ("p.md:10", "c = 1\n", "")
    assert third.language == ""
    assert [problem.split(": ")[0] for problem in hidden_commands("p.md", text)] == ["p.md:14", "p.md:18"]
    with pytest.raises(ValueError, match="p.md:1: the block has no end"):
        list(parse("p.md", "```python\n"))
    with pytest.raises(ValueError, match="is no mark"):
        list(parse("p.md", "<!-- not runn: x -->\n```python\n```\n"))


# ---- shell ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(6)
@pytest.mark.parametrize("page", having(*SHELL))
def test_commands(page: str, reader: Callable[[str], Path]) -> None:
    folder = reader(page)
    problems: list[str] = []
    for block in blocks_of(page):
        if block.language in SHELL and block.mark != "not run":
            for words in commands_of(block, folder):
                found = checked(words, block)
                if (block.mark, block.value) == ("exit code", "2"):
                    found = [] if found else ["this is to be refused"]
                problems += [f"{block.place}: {' '.join(words)}\n    {text}" for text in found]
                leave_behind(words, folder)
    assert not problems, "\n".join(problems)


def checked(words: list[str], block: Block) -> list[str]:
    """Return the problems of a command; commands shown on many pages are checked once."""
    own = any(word.startswith(("--config-dir", "-cd")) for word in words)
    key = (*words, sbatch_options(block))
    if key in _CHECKED and not own:
        return []
    problems = problems_of(words, sbatch_options(block))
    if not problems:
        _CHECKED.add(key)
    return problems


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("trainwright fit recipe=gpt stratgy=ddp", "did you mean strategy"),
        (
            "trainwright fit recipe=gpt strategy=ddp devices=2 strategy.shard=2",
            "'shard'; type strategy=zero1 or zero2 or zero3 or hybrid",
        ),
        ("trainwright fit recipe=gpt devices=3 strategy=hybrid strategy.tensor=2", "3"),
        ("trainwright layout recipe=gpt devices=2", "strategy=single trains on one device"),
        ("trainwright fit recipe=gpt nodes=2 strategy=ddp", "torchrun"),
        ("torchrun --nproc-per-node=2 -m trainwright fit recipe=gpt strategy=ddp devices=3", "has started 2"),
        ("srun --ntasks-per-node=4 trainwright fit recipe=gpt strategy=ddp devices=8", "has started 4"),
        ("trainwright fit -m recipe=digits strategy=ddp,zero9 devices=2", "zero9: unknown choice"),
        ("trainwright verify recipe=digits strategy=ddp devices=2 verify.step=1", "there is no such key"),
        ("trainwright plan recipe=gpt devices=4 device=h1000", "unknown choice"),
        ("trainwright checkpoint exprot runs/gpt", "no such verb"),
        ("trainwright checkpoint export runs/gpt --to there", "--format"),
        ("trainwright report --ot page.html runs/gpt", "--ot"),
        ("trainwright doctor device=4", "no such key of doctor"),
        ("trainwright import-deepspeed missing.json", "missing.json"),
        ("trainwright trian recipe=gpt", "there is no such verb"),
        ("trainwright trian --help", "there is no such verb"),
        ("python -m benchmarks.nothing", "no such module"),
        ("python train.py", "no such script"),
        ("make trane", "no target trane"),
        ("pip install 'trainwright[sluurm]'", "no extra sluurm"),
        ("trainright fit recipe=gpt", "no test knows this command"),
    ],
)
def test_a_wrong_command_is_found(line: str, problem: str, reader: Callable[[str], Path]) -> None:
    folder = reader("README.md")
    [words] = commands_of(Block("p.md", 1, "bash", f"{line}  # a comment\n"), folder)
    assert problem in "\n".join(problems_of(words))


def test_the_shell_splits_the_words(tmp_path: Path) -> None:
    typed = "three=\"a=1 b=2\"\nsome $three 'c=[1, 2]' \\\n    d={e:1} && .venv/bin/python -m f | other &\n"
    shown = "$ first \\\n> second\nfirst has said something\n$ third\n"
    found = commands_of(Block("p.md", 1, "bash", typed), tmp_path)
    assert sorted(found) == [["other"], ["python", "-m", "f"], ["some", "a=1", "b=2", "c=[1, 2]", "d={e:1}"]]
    assert commands_of(Block("p.md", 1, "console", shown), tmp_path) == [["first", "second"], ["third"]]
    with pytest.raises(AssertionError, match="p.md:1"):
        commands_of(Block("p.md", 1, "bash", "if true\n"), tmp_path)


# ---- yaml and json --------------------------------------------------------------------------------------------------


@pytest.mark.sample(5)
@pytest.mark.parametrize("page", having("yaml", "json"))
def test_configurations(page: str, reader: Callable[[str], Path]) -> None:
    folder = reader(page)
    problems: list[str] = []
    for block in blocks_of(page):
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml" and block.mark != "not run":
            yaml.safe_load(block.text)
            problems += [f"{block.place}: {text}" for text in problems_of_yaml(block, folder)]
        elif block.language in SHELL and "ln -s" in block.text:
            for words in commands_of(block, folder):
                leave_behind(words, folder)
    assert not problems, "\n".join(problems)


def problems_of_yaml(block: Block, folder: Path) -> list[str]:
    """Return the problems of a user's configuration file, or of lines of one."""
    conf = folder / "my_conf"
    if block.mark == "with":
        recipe, *others = block.value.removeprefix("recipe=").split()
        text = f"# @package _global_\ndefaults: [{recipe}, _self_]\n{block.text}"
        (conf / "recipe" / "lines_of_page.yaml").write_text(text, encoding="utf-8")
        return configured(["recipe=lines_of_page", *others], str(conf))
    path = Path(block.value)
    if any(f"--config={path}" in other.text for other in blocks_of(block.page)):
        return []  # of a script of the page, which test_scripts runs
    group = path.parent.name
    if path.parts[0] == "configs" and path.parts[1] != "trainwright":  # of a train.py of the reader's
        with initialize_config_dir(str(folder / "configs"), version_base=None):
            compose("train", [f"{group}={path.stem}"])
        return []
    conf = folder / path.parent.parent
    if path.parts[0] not in ("my_conf", "configs") or conf == folder:
        return [f"{path}: what is it? A file of a configuration is my_conf/<group>/<choice>.yaml"]
    if group == "recipe":
        return configured([f"recipe={path.stem}"], str(conf))
    return compose_checked(["recipe=gpt", f"{group}={path.stem}"], conf).problems


@pytest.mark.parametrize(
    ("value", "text", "problem"),
    [
        ("recipe=digits", "max_step: 3\n", "max_step"),
        ("recipe=digits", "callbacks:\n  mine:\n    _target_: trainwright.callbacks.nothing.Nothing\n", "nothing"),
        ("recipe=gpt strategy=hybrid devices=3", "strategy:\n  tensor: 2\n", "3"),
    ],
)
def test_a_wrong_yaml_is_found(value: str, text: str, problem: str, reader: Callable[[str], Path]) -> None:
    found = problems_of_yaml(Block("p.md", 1, "yaml", text, "with", value), reader("README.md"))
    assert problem in "\n".join(found)


# ---- Python ---------------------------------------------------------------------------------------------------------


@pytest.mark.sample(5)
@pytest.mark.parametrize("page", having("python"))
def test_python(page: str, reader: Callable[[str], Path], ranks: Callable[..., list[Any]]) -> None:
    reader(page)
    blocks = [block for block in blocks_of(page) if block.language == "python" and block.mark != "file"]
    runnable = [block for block in blocks if block.mark not in NOT_HERE]
    sizes = {size for block in runnable if (size := ranks_of(block)) is not None} or {1}
    for size in sorted(sizes):
        mine = [block for block in runnable if ranks_of(block) in (None, size)]
        assert size <= MOST_RANKS, f"{mine[0].place}: {size} ranks are too many here; mark it <!-- not run: why -->"
        # What composes and runs by itself meets as under torchrun; one rank alone needs no group.
        meets = any(re.search(r"\brun\(", block.text) for block in mine)
        ranks(run_blocks, size, mine, init_group=size > 1 and not meets)


@pytest.mark.sample(1)
@pytest.mark.parametrize("page", [page for page in pages() if called_scripts(page)])
def test_scripts(page: str, reader: Callable[[str], Path], ranks: Callable[..., list[Any]]) -> None:
    folder = reader(page)
    shown = called_scripts(page)
    for block in blocks_of(page):
        if block.language in SHELL and block.mark != "not run":
            for words in commands_of(block, folder):
                if words[0].startswith("python") and words[1] in shown:
                    size = ranks(run_script, 1, words[1:], init_group=False)[0]
                    assert size <= MOST_RANKS, f"{block.place}: {size} ranks are too many here"
                    if size > 1:
                        ranks(run_script, size, words[1:])


def ranks_of(block: Block) -> int | None:
    """How many ranks a block asks for; None where it leaves that to others of its page."""
    if block.mark == "ranks":
        return int(block.value)
    found = re.search(r"\bdevices=(\d+)", block.text)
    return int(found[1]) if found else None


@pytest.mark.parametrize("page", [page for page in pages() if any(b.language == "python" for b in blocks_of(page))])
def test_python_can_be_read(page: str) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            ast.parse(block.text, block.place)


def test_a_wrong_line_of_python_is_found(ranks: Callable[..., list[Any]]) -> None:
    wrong = Block("p.md", 7, "python", "from trainwright import Trainer\nTrainer(stratgy='ddp')\n")
    with pytest.raises(AssertionError, match=r'File "p.md", line 9'):
        ranks(run_blocks, 1, [wrong])
