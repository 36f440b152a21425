"""`trainwright report` and `trainwright watch` give a page or one paragraph, whatever a run directory holds.

Attempts: 150 run directories with junk in every place, from fixed seeds (each shown by both commands), and 8 files x 6
kinds of things that are no file of a sensible size. About 400 commands.
"""

import os
import random
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.security.deadlines import deadline
from tests.security.hostile_runs import ESCAPES, FILES, hostile_run
from tests.tools.report.parsed import Parsed
from tests.tools.report.runs import BEGAN, small_run, whole_run, write_records
from trainwright.tools.report.command import run_report_command

# What moves a cursor, hides or reorders text; a picture in the terminal has ends of lines beside letters.
UNSEEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
SECONDS = 30
MEMORY = 3 * 2**29


@contextmanager
def bounds() -> Iterator[None]:
    """Fail what takes half a minute, or 1.5 GiB more than there is now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, limits[1]))
    try:
        with deadline(SECONDS):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def shown(run: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The page and the picture of a run, after checking what holds for all of them; "" for one that was refused."""
    texts = []
    for words in (["report", str(run), "--out", str(out)], ["watch", str(run), "--once"]):
        out.unlink(missing_ok=True)
        with bounds():
            code = run_report_command(words)
        said = capsys.readouterr()
        assert code in (0, 2)
        assert len(said.err.splitlines()) == (code == 2), said.err
        assert not UNSEEN.search(said.out + said.err.rstrip("\n")), ascii(said.out + said.err)
        text = said.out if words[0] == "watch" else out.read_text(encoding="utf-8") if code == 0 else ""
        assert len(text) < 4_000_000
        assert not re.search(r'"(nan|-?inf)%?"|[ML](nan|inf)', text)
        texts.append(text)
    return texts[0], texts[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(5))
def test_junk_in_every_place(tmp_path, capsys, seed):
    random.seed(seed)
    chance = random.Random(seed)
    for number in range(30):
        run = tmp_path / f"{number}"
        hostile_run(run, chance)
        page, _ = shown(run, tmp_path / "page.html", capsys)
        assert "</html>" in page


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 20 * 10**9)


def _long_tail(path: Path) -> None:
    """20 GB of nothing between lines that are good."""
    lines = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(20 * 10**9)
        file.write(b"\n" + lines)


def _foreign(path: Path) -> None:
    """A link to what is no part of the run, and must not get onto a page that others see."""
    secret = path.parents[len(path.parents) - 1] / path.resolve().parent / "secret"
    secret.write_text("password: swordfish\nloss,step\nswordfish,1\n")
    path.symlink_to(secret)


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [_fifo, _zeros, _sparse, _long_tail, _foreign, _folder])
def test_what_is_no_file_of_a_sensible_size(tmp_path, capsys, kind):
    for number, name in enumerate(FILES):
        run = whole_run(tmp_path / f"run{number}")
        if kind is not _long_tail:
            (run / name).unlink()
        kind(run / name)
        page, picture = shown(run, tmp_path / "page.html", capsys)
        assert "swordfish" not in page + picture
        assert "</html>" in page
        named = (Path(name).name, "The files of monitor/ are long") if "monitor" in name else (Path(name).name,)
        assert any(words in Parsed(page).text for words in named), name


def test_files_cannot_control_the_terminal(tmp_path, capsys):
    run = small_run(tmp_path / "a\x1b[31m\u202e\nrun")
    names = [text.replace("\n", " ").replace("\r", " ") for text in ESCAPES]
    (run / "metrics.csv").write_text(
        ",".join([f"{name}_per_second" for name in names[:4]] + ["loss", "step"]) + "\n1,2,3,4,nan,5\n"
    )
    write_records(run, 0, [{"time": BEGAN, "kind": "event", "what": text, "text": f"{text}end"} for text in ESCAPES])
    _, picture = shown(run, tmp_path / "page.html", capsys)
    assert "title" not in picture
    assert "two lines tab" in picture


def test_words_that_are_no_path(capsys):
    for path in ("x" * 5000, "a\x1b[31mb", "/dev/zero", "/proc/self/mem/x"):
        assert run_report_command(["report", path]) == 2
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1
        assert "\x1b" not in said
    for every in ("inf", "nan", "1e300", "0"):
        assert run_report_command(["watch", "nothing", "--every", every]) == 2
        assert "--every" in capsys.readouterr().err


def test_a_page_is_never_written_through_a_link(tmp_path, capsys):
    run = small_run(tmp_path / "run")
    kept = tmp_path / "kept"
    kept.write_text("mine")
    (run / f"report.html.{os.getpid()}.partial").symlink_to(kept)
    (run / "report.html").symlink_to(kept)
    assert run_report_command(["report", str(run)]) == 0
    assert kept.read_text() == "mine"
    assert "</html>" in (run / "report.html").read_text()
