import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainwright.recipes.data.corpus import (
    STALE_SECONDS,
    CorpusError,
    check,
    default_cache_dir,
    find_corpus,
    join_files,
    joined_file,
    num_windows,
    problems_of_size,
    split_by_position,
    standard_library,
)


def test_checks_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, trainwright.recipes.data.corpus, trainwright.recipes.extras\n"
        "from trainwright.command.schema.compose import compose\n"
        "from trainwright.recipes.hugging_face import checks\n"
        "assert not checks.check(compose('hf_causal_lm'), 1)\n"
        "assert not {'torch', 'transformers', 'lightning', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_standard_library_is_text_without_tests() -> None:
    corpus = standard_library()
    names = [file.relative_to(corpus.root).as_posix() for file in corpus.files]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    assert not [name for name in names if "/test/" in f"/{name}" or "site-packages" in name]
    assert 5 * 2**20 < corpus.num_bytes < 50 * 2**20


def test_folder_is_concatenated_once(tmp_path: Path) -> None:
    folder, cache = tmp_path / "texts", tmp_path / "cache"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "one.txt").write_text("no newline")
    (folder / "a.txt").write_text("ä\n", encoding="utf-8")
    (folder / "c.txt").write_text("")
    (folder / ".hidden").write_bytes(b"\0")
    corpus = find_corpus(folder)
    joined = join_files(corpus, cache)
    assert joined.read_text(encoding="utf-8") == "ä\nno newline\n"
    assert [file.name for file in cache.iterdir()] == [joined.name]
    stamp = joined.stat().st_mtime_ns
    assert join_files(find_corpus(folder), cache) == joined
    assert joined.stat().st_mtime_ns == stamp


def test_changed_text_gets_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    first = joined_file(find_corpus(tmp_path), tmp_path)
    (tmp_path / "a.txt").write_text("two!")
    assert joined_file(find_corpus(tmp_path), tmp_path) != first


def test_single_file_is_used_in_place(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("some text")
    assert join_files(find_corpus(file), tmp_path / "cache") == file
    assert not (tmp_path / "cache").exists()


def test_failures_and_stale_files(tmp_path: Path) -> None:
    folder, cache = tmp_path / "texts", tmp_path / "cache"
    folder.mkdir()
    cache.mkdir()
    # Beyond the first MiB, which only the concatenation reads.
    (folder / "long.txt").write_bytes(b"x" * (2**20 + 10) + b"\xff")
    old, new = cache / "other.txt.1.unfinished", cache / "other.txt.2.unfinished"
    old.write_text("rest of a killed process")
    new.write_text("another process at work")
    past = time.time() - STALE_SECONDS - 1
    os.utime(old, (past, past))
    with pytest.raises(CorpusError, match=r"long\.txt is not text: byte 0xff is not UTF-8"):
        join_files(find_corpus(folder), cache)
    assert list(cache.iterdir()) == [new]


def test_character_at_the_end_of_the_checked_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * (2**20 - 1) + "ä".encode())
    assert find_corpus(file).num_bytes == 2**20 + 1


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/trainwright/corpora")


@pytest.mark.parametrize(("make", "path", "pattern", "said"), [
    ({}, "absent.txt", "*", ("absent.txt does not exist", "Type a text file")),
    ({"a.txt": b""}, "a.txt", "*", ("is empty (0 bytes",)),
    ({"d/a.txt": b""}, "d", "*", ("is empty (0 bytes",)),
    ({"d/a.md": b"x"}, "d", "*.txt", ("no file whose name matches data.pattern='*.txt'",)),
    ({"a.bin": b"ab\0cd"}, "a.bin", "*", ("a.bin is not text: it has a zero byte", "convert it to UTF-8")),
    ({"a.txt": b"caf\xe9 au lait"}, "a.txt", "*", ("byte 0xe9 is not UTF-8",)),
    ({"d/a.txt": b"x", "d/b.png": b"\x89PNG"}, "d", "*", ("b.png is not text", "data.pattern='*.txt'")),
])  # fmt: skip
def test_bad_paths(tmp_path: Path, make: dict[str, bytes], path: str, pattern: str, said: tuple[str, ...]) -> None:
    for name, content in make.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError) as error:
        find_corpus(tmp_path / path, pattern)
    for words in said:
        assert words in str(error.value)
    assert check(config(path=str(tmp_path / path), pattern=pattern), 1) == [str(error.value)]


def test_split_covers_every_byte_once() -> None:
    split = split_by_position(1001, 0.1)
    assert split.train == (0, 901)
    assert split.validation == (901, 951)
    assert split.test == (951, 1001)


def test_windows_overlap_by_one_byte() -> None:
    assert [num_windows(size, 4) for size in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize(("size", "seq_len", "held_out", "ranks", "said"), [
    (100, 0, 0.5, 1, "data.seq_len=0 (allowed"),
    (100, 4, 0.0, 1, "data.held_out=0.0 (allowed"),
    (100, 4, 1.0, 1, "data.held_out=1.0 (allowed"),
    (100, 64, 0.5, 1, "The training text has 50 bytes, which is 0 windows of data.seq_len=64"),
    (100, 20, 0.5, 4, "4 data ranks need one each"),
    (100, 20, 0.05, 1, "The validation text has 3 bytes"),
])  # fmt: skip
def test_too_short(size: int, seq_len: int, held_out: float, ranks: int, said: str) -> None:
    assert said in problems_of_size(size, seq_len, held_out, ranks)[0]


def test_long_enough() -> None:
    assert problems_of_size(10_000, 16, 0.05, 8) == []
    assert check(config(path=None), 8) == []


def config(**data: Any) -> dict[str, Any]:
    return {"data": {"seq_len": 128, "held_out": 0.05, "pattern": "*", **data}}
