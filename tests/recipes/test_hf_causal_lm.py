import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch import seed_everything
from safetensors.torch import save_file

from tests.parity.harness import QUIET
from trainwright import Trainer, compose
from trainwright.recipes.data.token_corpus import TokenCorpus
from trainwright.recipes.generation.generate import generate
from trainwright.recipes.generation.prompts import ContinuePrompts, PromptData
from trainwright.recipes.generation.sampling import Sampling
from trainwright.recipes.hugging_face import checks as hf_checks
from trainwright.recipes.hugging_face.causal_lm import HuggingFaceModule

SMALL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def saved(folder: Path) -> Path:
    """Write a folder with ``save_pretrained``."""
    seed_everything(5)
    HuggingFaceModule(SMALL).model.save_pretrained(folder)
    return folder


def make_tokenizer(folder: Path, text: Path) -> Path:
    """Write a tokenizer of 300 tokens trained on the text."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(text)], vocab_size=300, show_progress=False)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_loss_falls(text: Path) -> None:
    seed_everything(0)
    module = HuggingFaceModule(SMALL, seq_len=16, warmup_steps=2)
    data = TokenCorpus(path=text, seq_len=16, batch_size=16)
    trainer = LightningTrainer(max_steps=100, devices=1, **QUIET)
    before = trainer.validate(module, data, verbose=False)[0]
    trainer.fit(module, data)
    after = trainer.validate(module, data, verbose=False)[0]
    assert before["val_bpb"] == pytest.approx(8, abs=0.5)  # uniform over 256 bytes
    assert after["val_bpb"] < 4


def test_weights_and_sizes_of_a_folder(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    seed_everything(1)
    module = HuggingFaceModule({"attention_dropout": 0.25}, pretrained=folder)
    seed_everything(5)
    wanted = HuggingFaceModule(SMALL)
    assert module.model.training
    assert module.model.config.attention_dropout == 0.25
    assert module.model.config.use_cache  # exports must generate like the folder
    assert module.model.config._attn_implementation == "document_attention"
    for (name, found), value in zip(module.named_parameters(), wanted.parameters(), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, value), name


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        HuggingFaceModule(pretrained=folder)


def test_folder_without_matching_weights(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    state = HuggingFaceModule(SMALL).model.state_dict()
    save_file({f"other.{name}.part": value.clone() for name, value in state.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="none of its tensors .*other"):
        HuggingFaceModule(pretrained=folder)


def fitted(folder: str, strategy: str, meta: bool, pretrained: str | None = None) -> float:
    trainer = Trainer(strategy=strategy, devices=2, max_steps=6, global_batch_size=16, **QUIET)
    data = TokenCorpus(path=Path(folder) / "text.txt", seq_len=16, batch_size=4)
    seed_everything(0)
    module = HuggingFaceModule(None if pretrained else SMALL, pretrained, seq_len=16, meta=meta)
    seed_everything(0)
    trainer.fit(module, data)
    return float(torch.cat(trainer.predict(module, data)).mean())


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["zero3", "pipeline"])
def test_deferred_build_trains(text: Path, ranks: Callable[..., list[Any]], strategy: str) -> None:
    ordinary, deferred = (ranks(fitted, 2, str(text.parent), strategy, meta) for meta in (False, True))
    assert deferred[0] == deferred[1]
    assert deferred[0] == pytest.approx(ordinary[0], rel=0.1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["zero3", "pipeline"])
def test_ranks_read_their_parts_of_a_folder(
    tmp_path: Path, text: Path, ranks: Callable[..., list[Any]], strategy: str
) -> None:
    folder = str(saved(tmp_path / "saved"))
    assert HuggingFaceModule(pretrained=folder, meta="auto").model is None
    whole, parts = (ranks(fitted, 2, str(text.parent), strategy, meta, folder) for meta in (False, "auto"))
    assert whole == parts


def test_tokens_decode_to_the_text(tmp_path: Path, text: Path) -> None:
    folder, cache = make_tokenizer(tmp_path / "tokenizer", text), tmp_path / "cache"
    data = TokenCorpus(tokenizer=folder, path=text, seq_len=32, batch_size=4, cache_dir=cache)
    data.prepare_data()
    data.setup("fit")
    assert data.train is not None
    window = data.train[0]
    assert window.dtype == torch.int32
    start = data.decode(window.tolist())
    assert len(start) > 33  # words, not bytes
    assert text.read_text().startswith(start)
    (file,) = cache.iterdir()
    whole = torch.from_file(str(file), size=file.stat().st_size // 4, dtype=torch.int32)
    assert data.decode(whole.tolist()) == text.read_text()


def test_changed_text_gets_new_tokens(tmp_path: Path, text: Path) -> None:
    folder, cache = make_tokenizer(tmp_path / "tokenizer", text), tmp_path / "cache"
    data = TokenCorpus(tokenizer=folder, path=text, seq_len=32, cache_dir=cache)
    first = data.file()
    assert data.file() == first
    text.write_text(text.read_text() + "more\n")
    assert data.file() != first
    assert not [file for file in cache.iterdir() if file.suffix == ".unfinished"]


def test_prompts_in_tokens(tmp_path: Path, text: Path) -> None:
    folder = make_tokenizer(tmp_path / "tokenizer", text)
    data = PromptData(["the quick"], TokenCorpus(tokenizer=folder, path=text), Sampling(3))
    trainer = LightningTrainer(devices=1, callbacks=[ContinuePrompts()], **QUIET)
    module = HuggingFaceModule({**SMALL, "vocab_size": 300}, seq_len=16)
    (said,) = trainer.predict(module, data)
    words = data.encode("the quick")
    assert len(words) < len("the quick")
    assert said["new"] == [data.decode(ids) for ids in generate(module, [words], Sampling(3))]
    assert said["tokens"] == [3]


def problems(*overrides: str) -> str:
    return "\n".join(hf_checks.check(compose("hf_causal_lm", overrides), 1))


def test_defaults_of_every_model_pass() -> None:
    for model in ("llama", "qwen2", "gpt2", "mixtral"):
        assert problems(f"model={model}") == ""


@pytest.mark.sample(5)
@pytest.mark.parametrize(("overrides", "said"), [
    (["module.config.hidden_size=100"], "hidden_size=100 with 8 heads (allowed: a multiple of the heads)"),
    (["module.config.num_key_value_heads=3"], "num_key_value_heads=3 with 8 heads"),
    (["module.config.num_hidden_layers=0"], "num_hidden_layers=0 (allowed: 1 or more)"),
    (["module.config.vocab_size=100"], "vocab_size=100, but there are 256 bytes of text without data.tokenizer"),
    (["model=gpt2", "module.seq_len=1024"], "module.seq_len=1024, but the model has 512 positions"),
    (["model=mixtral", "module.config.num_experts_per_tok=9"], "num_experts_per_tok=9 of 8 experts"),
    (["model=mixtral", "+module.config.output_router_logits=true"], "recipe=moe balances"),
    (["module.config.model_type=lama"], "no causal language model of that name. Similar or common ones: llama"),
    (["module.pretrained=/nowhere"], "Type model=pretrained module.pretrained=/nowhere"),
    (["model=pretrained", "module.pretrained=/nowhere"], "this folder does not exist"),
    (["data.tokenizer=/nowhere"], "tokenizer.json cannot be read (FileNotFoundError)"),
])  # fmt: skip
def test_impossible_configurations(overrides: list[str], said: str) -> None:
    assert said in problems(*overrides)


def test_checks_of_folders(tmp_path: Path, text: Path) -> None:
    folder = saved(tmp_path / "saved")
    given = ["model=pretrained", f"module.pretrained={folder}"]
    assert problems(*given) == ""
    assert problems(*given, "module.meta=true") == ""
    tokenizer = make_tokenizer(tmp_path / "tokenizer", text)
    assert f"{folder}/config.json: vocab_size=256, but there are 300 tokens" in problems(
        *given, f"data.tokenizer={tokenizer}"
    )
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 64}))
    assert "module.seq_len=128, but the model has 64 positions" in problems(*given)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has no *.safetensors; pickled weights are not read" in problems(*given)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'Type: pip install "trainwright[huggingface]"' in problems()
