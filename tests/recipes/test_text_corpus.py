import pickle
from pathlib import Path

import pytest
import torch

from trainwright.recipes.data.text_corpus import TextCorpus, TextWindows


def test_every_byte_is_predicted_once(text: Path) -> None:
    content = text.read_bytes()
    windows = TextWindows(text, 10, 111, seq_len=25)
    assert len(windows) == 4
    assert b"".join(bytes(windows[i][1:].tolist()) for i in range(4)) == content[11:111]
    assert windows[0].dtype == torch.uint8
    assert windows[3].shape == (26,)
    with pytest.raises(IndexError, match="window 4 of 4"):
        windows[4]


def test_pickled_windows_exclude_the_text(text: Path) -> None:
    windows = TextWindows(text, 0, 1000, seq_len=25)
    first = windows[0]
    pickled = pickle.dumps(windows)
    assert len(pickled) < 1000
    assert torch.equal(pickle.loads(pickled)[0], first)


def test_splits_are_disjoint(text: Path) -> None:
    data = TextCorpus(text, seq_len=8, batch_size=4, held_out=0.2)
    data.prepare_data()
    data.setup("fit")
    content = text.read_bytes()
    parts = [
        b"".join(bytes(row[:-1].tolist()) for batch in loader for row in batch)
        for loader in (data.val_dataloader(), data.test_dataloader())
    ]
    held = len(content) - round(0.2 * len(content))
    assert content[held:].startswith(parts[0])
    assert parts[1] in content[held + len(parts[0]) :]
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (4, 9)
    assert all(bytes(row.tolist()) in content[:held] for row in batch)


def test_loader_processes(text: Path) -> None:
    data = TextCorpus(text, seq_len=8, batch_size=4, held_out=0.2, num_workers=1)
    data.setup("fit")
    alone = TextCorpus(text, seq_len=8, batch_size=4, held_out=0.2)
    alone.setup("fit")
    for one, other in zip(data.val_dataloader(), alone.val_dataloader(), strict=True):
        assert torch.equal(one, other)


def test_folder_is_concatenated_in_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(name * 500)
    data = TextCorpus(folder, seq_len=8, cache_dir=tmp_path / "cache")
    data.prepare_data()
    data.setup("fit")
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_too_short(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ValueError, match="The training text has 5 bytes"):
        TextCorpus(tmp_path / "a.txt").setup("fit")


def test_decoding_of_invalid_bytes() -> None:
    assert TextCorpus().decode([104, 105, 255, 10]) == "hi\\xff\n"
