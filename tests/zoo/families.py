"""Families of transformers, with random weights: tiny configurations of what people fine-tune."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.base import (
    CLASSES,
    DIM,
    LENGTH,
    SAMPLES,
    VOCABULARY,
    Computes,
    _labels,
    _random,
    alike,
    images,
    loader,
    texts,
)
from tests.zoo.cells import Row

_SIZES: dict[str, int] = {
    "hidden_size": DIM,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": VOCABULARY + 8,
    "max_position_embeddings": 64,
    "num_labels": CLASSES,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": VOCABULARY + 7,  # in no sample: its embedding is zero, and gradients of norms of zeros explode
}


def build(auto: str, family: str, **options: Any) -> nn.Module:
    """A model of transformers without dropout: ``auto`` is what follows ``AutoModelFor``."""
    import transformers

    sizes = {name: value for name, value in {**_SIZES, **options}.items() if value is not None}
    config = transformers.AutoConfig.for_model(family, **sizes)
    parts = [getattr(config, name) for name in ("text_config", "vision_config") if hasattr(config, name)]
    for part in (config, *parts):
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or name == "mask_time_prob"):
                setattr(part, name, 0.0)
    model: nn.Module = getattr(transformers, f"AutoModel{auto and 'For'}{auto}").from_config(config)
    return model.train()


def model(auto: str, family: str, **options: Any) -> Callable[[], Computes]:
    return partial(Computes, partial(build, auto, family, **options))


lm, masked = partial(model, "CausalLM"), partial(model, "MaskedLM")
HALVES = {
    "d_model": DIM, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 2,
}  # fmt: skip
seq2seq = partial(model, "Seq2SeqLM", **HALVES)


class Images(Computes):
    """A model of transformers on ``images``."""

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.net(pixel_values=batch[0], labels=batch[1]).loss
        return loss


def vision(family: str, **options: Any) -> Callable[[], Images]:
    sizes = {"image_size": 8, "patch_size": 4}
    return partial(Images, partial(build, "ImageClassification", family, **{**sizes, **options}))


def spoken(batch: int) -> Any:
    """``{"input_features": (B, 8, 16), "labels": (B, 8)}``: a spectrum and what was said."""
    spectrum = torch.randn(SAMPLES, 8, 16, generator=_random())
    return loader(batch, input_features=spectrum, labels=_labels(SAMPLES, LENGTH, classes=VOCABULARY))


def waves(batch: int) -> Any:
    """``{"input_values": (B, 400), "labels": (B,)}``: sound and its class."""
    return loader(batch, input_values=torch.randn(SAMPLES, 400, generator=_random()), labels=_labels(SAMPLES))


def captioned(batch: int) -> Any:
    """``{"pixel_values": (B, 3, 8, 8), "input_ids": (B, 8)}``."""
    pixels = torch.randn(SAMPLES, 3, 8, 8, generator=_random())
    return loader(batch, pixel_values=pixels, input_ids=_labels(SAMPLES, LENGTH, classes=VOCABULARY))


class Contrastive(Computes):
    """A model that compares all images of a batch with all its texts."""

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.net(**batch, return_loss=True).loss
        return loss


def clip(family: str) -> Callable[[], Contrastive]:
    tower = {"hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    names = {"vocab_size": VOCABULARY + 8, "max_position_embeddings": LENGTH, "eos_token_id": 2, "bos_token_id": 1}
    text, image = {**tower, **names}, {**tower, "image_size": 8, "patch_size": 4}
    options = {"text_config": text, "vision_config": image, "projection_dim": DIM}
    return partial(Contrastive, partial(build, "", family, **options))


GPT2 = {"n_embd": DIM, "n_layer": 2, "n_head": 4, "n_positions": 32}
EXPERTS = {
    "shared_expert_intermediate_size": 16, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}  # fmt: skip
WAVES = {
    "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8,
}  # fmt: skip
DECODERS = (
    "llama", "mistral", "qwen2", "olmo", "olmo2", "stablelm", "starcoder2", "phi", "phi3", "granite", "cohere",
    "persimmon", "gpt_neox", "smollm3", "nemotron", "exaone4",
)  # fmt: skip
ENCODERS = (
    "bert", "roberta", "deberta", "deberta-v2", "camembert", "layoutlm", "fnet", "nystromformer", "ernie", "mpnet",
    "esm",
)  # fmt: skip
SWIN = {
    "num_attention_heads": None, "num_hidden_layers": None, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4],
    "window_size": 2, "patch_size": 2,
}  # fmt: skip
WHISPER = {
    **HALVES, "decoder_start_token_id": 1, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16,
}  # fmt: skip
XLNET = {"max_position_embeddings": None, "d_model": DIM, "n_layer": 2, "n_head": 4, "d_inner": 32}
T5 = {"d_model": DIM, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
ALL = "zero3, tensor, pipeline"
RECOMPUTED = dict.fromkeys(ALL.split(", "), {"activation_checkpointing": "full"})
ROWS = [
    Row("gemma2, recomputed", lm("gemma2", head_dim=4), texts, equal=ALL, options=RECOMPUTED),
    *(Row(family, lm(family), texts, either=ALL) for family in DECODERS),
    *(
        Row(family, lm(family, head_dim=4), texts, either=ALL)
        for family in ("gemma", "gemma2", "gemma3_text", "qwen3", "glm", "helium")
    ),
    *(Row(family, lm(family, **GPT2), texts, either=ALL) for family in ("gpt2", "gpt_bigcode")),
    *(Row(family, lm(family, **GPT2, rotary_dim=4), texts, either=ALL) for family in ("gptj", "codegen")),
    Row("gpt_neo", lm("gpt_neo", num_layers=2, num_heads=4, attention_types=[[["global"], 2]]), texts, either=ALL),
    Row("opt", lm("opt", ffn_dim=32, word_embed_proj_dim=DIM), texts, either=ALL),
    Row("bloom", lm("bloom", n_layer=2, n_head=4), texts, either=ALL),
    Row("mpt", lm("mpt", d_model=DIM, n_heads=4, n_layers=2, max_seq_len=32), texts, either=ALL),
    Row("falcon", lm("falcon"), texts, either=ALL),
    Row("falcon, alibi", lm("falcon", alibi=True, multi_query=False), texts, either=ALL),
    Row("biogpt", lm("biogpt"), texts, either=ALL),
    Row("xglm", lm("xglm", d_model=DIM, num_layers=2, attention_heads=4, ffn_dim=32), texts, either=ALL),
    *(Row(f, lm(f, **EXPERTS), texts, either=ALL) for f in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")),
    Row("mamba", lm("mamba", state_size=4, expand=2), texts, either=ALL),
    Row("mamba2", lm("mamba2", state_size=4, num_heads=4, head_dim=8, expand=2, n_groups=1), texts, either=ALL),
    Row("rwkv", lm("rwkv", attention_hidden_size=DIM, context_length=32), texts, either=ALL),
    *(Row(family, masked(family), texts, either=ALL) for family in ENCODERS),
    Row("distilbert", masked("distilbert", dim=DIM, hidden_dim=32, n_layers=2, n_heads=4), texts, either=ALL),
    Row("electra", masked("electra", embedding_size=DIM), texts, either=ALL),
    Row("albert", masked("albert", embedding_size=DIM, num_hidden_groups=2), texts, either=ALL),
    Row("xlnet", lm("xlnet", **XLNET), texts, either=ALL),
    Row("t5", model("Seq2SeqLM", "t5", **T5), texts, either=ALL),
    Row("bart, recomputed", seq2seq("bart"), texts, equal="zero3, tensor", options=RECOMPUTED),
    *(Row(f, seq2seq(f), texts, either=ALL) for f in ("bart", "pegasus", "marian", "mbart", "blenderbot-small")),
    *(Row(family, vision(family), images, either=ALL) for family in ("vit", "dinov2", "beit")),
    Row("swin", vision("swin", **SWIN), images, either=ALL),
    Row("convnext", vision("convnext", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2), images, either=ALL),
    Row("resnet", vision("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]), images, either="tensor"),
    Row("clip", clip("clip"), captioned, either="tensor, pipeline"),
    Row("siglip", clip("siglip"), captioned, either="tensor, pipeline"),
    Row("whisper", model("SpeechSeq2Seq", "whisper", **WHISPER), alike(spoken), either=ALL),
    *(Row(f, model("AudioClassification", f, **WAVES), waves, either=ALL) for f in ("wav2vec2", "hubert")),
]
