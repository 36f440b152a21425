import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

from tests.parity.harness import QUIET
from tests.recipes.finetune.fixtures import write_base, write_chats
from trainwright import Trainer
from trainwright.recipes.finetune.data import IGNORED, FineTuneData, pack, pieces_of
from trainwright.recipes.finetune.module import FineTuneModule


@pytest.mark.parametrize("split", [True, False])
def test_every_token_is_predicted_once(split: bool) -> None:
    lengths = [random.Random(0).randrange(1, 40) for _ in range(100)] + [1, 2, 17, 33]
    pieces = pieces_of(lengths, 16, split)
    rows = pack(pieces, 16)
    predicted = Counter((piece.document, place + 1) for piece in pieces for place in range(piece.begin, piece.end))
    assert set(predicted.values()) == {1}
    assert set(predicted) == {
        (number, place) for number, n in enumerate(lengths) for place in range(1, n if split else min(n, 17))
    }
    assert sorted(piece for row in rows for piece in row) == sorted(pieces)
    assert max(sum(piece.size for piece in row) for row in rows) <= 16
    assert len(rows) <= 11 / 9 * -(-sum(piece.size for piece in pieces) // 16) + 4
    assert rows == pack(pieces, 16)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "mixtral", "gemma2"])
def test_packed_losses_equal_those_of_documents(tmp_path: Path, family: str) -> None:
    base = write_base(tmp_path / "base", family)
    data = FineTuneData(
        str(write_chats(tmp_path / "chats.jsonl")), base, "chat", seq_len=160, cache_dir=tmp_path, held_out=0.0
    )
    data.prepare_data()
    data.setup("fit")
    assert data.train is not None
    module = FineTuneModule(str(base), meta=False).eval()
    seen = 0
    for row, pieces in zip(data.train, data.train.rows, strict=True):
        with torch.no_grad():
            batch = default_collate([row])
            packed = F.cross_entropy(module.logits(batch), batch["labels"][0], reduction="none", ignore_index=IGNORED)
            begin = 0
            for piece in pieces:
                read, predicted, trained = data.train.documents.of(piece)
                ids = torch.from_numpy(read.astype("int64"))[None]
                logits = module.model(input_ids=ids).logits[0].float()  # type: ignore[misc]
                alone = F.cross_entropy(logits, torch.from_numpy(predicted.astype("int64")), reduction="none")
                alone[torch.from_numpy(trained < 0)] = 0
                torch.testing.assert_close(packed[begin : begin + piece.size], alone, rtol=1e-6, atol=4e-6)
                begin += piece.size
                seen += 1
            assert not packed[begin:].any()
    assert seen == 40 > len(data.train)


def test_state_space_models_are_refused(tmp_path: Path) -> None:
    """Their state crosses the border between two documents."""
    base = write_base(tmp_path / "base", "mamba", state_size=4)

    def fit(**options: Any) -> None:
        chats = str(write_chats(tmp_path / "chats.jsonl"))
        data = FineTuneData(chats, base, "chat", seq_len=160, cache_dir=tmp_path, **options)
        Trainer(max_steps=1, devices=1, **QUIET).fit(FineTuneModule(str(base)), data)

    with pytest.raises(ValueError, match=r"data\.packing=false"):
        fit()
    fit(packing=False)
