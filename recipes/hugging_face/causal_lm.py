"""Module of the ``hf_causal_lm`` recipe: any causal language model of Hugging Face transformers."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainwright import document_attention, document_mask
from trainwright.recipes.hugging_face.chunked_logits import logits_in_chunks
from trainwright.recipes.hugging_face.folders import covers, model_folder, tensor_names
from trainwright.recipes.language_model import LanguageModule, OptimizerFactory

# Code of models that treats "sdpa" in a way of its own.
_ASKS = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)")


class HuggingFaceModule(LanguageModule):
    """Next-token prediction by a model of ``transformers``, from its configuration or from a folder.

    Nothing is downloaded and no loaded file runs code: weights come from safetensors, classes only from the installed
    ``transformers``. Logs the metrics of :class:`~trainwright.recipes.language_model.LanguageModule`.

    Args:
        config: ``model_type`` (such as ``llama``) and sizes by the names of that model's configuration; with
            ``pretrained``: values that override those in the folder, without ``model_type``.
        pretrained: a folder written by ``save_pretrained``, or with ``allow_download`` the id of a model on the Hugging
            Face Hub; ``None``: random initial weights.
        seq_len: trained tokens per window.
        optimizer, warmup_steps, schedule_steps, final_lr_factor: see
            :class:`~trainwright.recipes.language_model.LanguageModule`.
        meta: build the model in ``configure_model`` without memory, for strategies that initialize it piece by piece;
            with ``pretrained`` each rank then reads its parts of the weights. ``"auto"``: if the folder has the weights
            under the names of the model; without ``pretrained`` off.
        allow_download: whether an id may be looked up on the Hub.
        loss_chunk: positions whose logits exist at once while a loss is computed; backward recomputes them. 0: all
            positions.
        float8: see :func:`~trainwright.recipes.float8.to_float8`; ``None`` is off.

    Raises:
        ModuleNotFoundError: if ``transformers`` is not installed.
        FileNotFoundError: if there is no folder ``pretrained``.
        ValueError: if the arguments contradict each other, or ``transformers`` has no such causal language model.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        pretrained: str | os.PathLike[str] | None = None,
        seq_len: int = 128,
        optimizer: OptimizerFactory | None = None,
        warmup_steps: int | None = 20,
        schedule_steps: int | None = None,
        final_lr_factor: float | None = 0.1,
        meta: bool | str = False,
        allow_download: bool = False,
        loss_chunk: int = 0,
        float8: str | None = None,
    ) -> None:
        super().__init__(seq_len, optimizer, warmup_steps, schedule_steps, final_lr_factor, float8)
        if loss_chunk < 0:
            raise ValueError(f"loss_chunk={loss_chunk} (allowed: 0 = off, or positions). Type module.loss_chunk=512")
        self.loss_chunk = loss_chunk
        self.config = dict(config or {})
        if ("model_type" in self.config) == (pretrained is not None):
            raise ValueError(
                f"config={self.config} and pretrained={pretrained} (allowed: a config with model_type, or a folder)."
            )
        self.pretrained = None if pretrained is None else model_folder(pretrained, allow_download)
        self.deferred = self._can_defer() if meta == "auto" else bool(meta)
        # Strategies load their parts of these weights, unless a checkpoint is loaded.
        self.initial_weights = self.pretrained if self.deferred else None
        self.model: nn.Module | None = None if self.deferred else self.make_model()

    def build(self) -> nn.Module:
        """Return a new network in float32 with random weights, or with those of the folder."""
        import transformers

        sizes = dict(self.config)
        auto = transformers.AutoConfig
        if self.pretrained is None:
            config = auto.for_model(sizes.pop("model_type"), **sizes)
        else:
            config = auto.from_pretrained(self.pretrained, local_files_only=True, trust_remote_code=False, **sizes)
        attention = _attention_of(transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None))
        if self.pretrained is not None and not self.deferred:
            return self._load(config, attention)
        made: Any = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, trust_remote_code=False, dtype=torch.float32
        )
        if self.pretrained is not None and (self.pretrained / "generation_config.json").is_file():
            made.generation_config = transformers.GenerationConfig.from_pretrained(self.pretrained)
        network: nn.Module = made
        return network

    def _can_defer(self) -> bool:
        """Return whether the folder has the tensors of the model, which some architectures fuse when they load."""
        self.deferred = True
        if self.pretrained is None:
            return False
        with torch.device("meta"):
            model: Any = HuggingFaceModule.build(self)
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        wanted = [name for name, _ in model.named_parameters() if name not in tied]
        return covers(tensor_names(self.pretrained), wanted, f"{model.base_model_prefix}.")

    def _load(self, config: Any, attention: str | None) -> nn.Module:
        import transformers
        from transformers.utils import logging

        assert self.pretrained is not None
        loaded: nn.Module
        both: Any  # transformers' types omit the loading info
        had_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # every rank would show one
        try:
            both = transformers.AutoModelForCausalLM.from_pretrained(
                self.pretrained,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                config=config,
                attn_implementation=attention,
                dtype=torch.float32,
                output_loading_info=True,
            )
        finally:
            if had_bar:
                logging.enable_progress_bar()
        loaded, about = both
        if all(name in about["missing_keys"] for name, _ in loaded.named_parameters()):
            found = ", ".join(sorted(about["unexpected_keys"])[:4]) or "there are none"
            raise ValueError(
                f"pretrained={self.pretrained}: none of its tensors ({found}) belongs to {type(loaded).__name__}, so "
                "all weights would be random. Type a folder written by save_pretrained for this architecture."
            )
        return loaded.train()

    def forward(self, tokens_BT: Tensor) -> Tensor:  # noqa: N803
        """Map integer ids ``(B, T)`` to logits ``(B, T, V)`` of the next token."""
        assert self.model is not None, "configure_model has not run"
        logits_BTV: Tensor = self.model(input_ids=tokens_BT, use_cache=False).logits  # noqa: N806
        return logits_BTV

    def _logits_and_targets(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        assert self.model is not None, "configure_model has not run"
        with logits_in_chunks(self.model, self.loss_chunk):
            return super()._logits_and_targets(windows)


def _attention_of(model: Any) -> str | None:
    """Return the attention of a model's class: torch's, which has fast GPU kernels and which a context axis can split,
    by document where rows are packed; ``None``: state space models have none."""
    if not getattr(model, "_supports_sdpa", True):
        return None
    if not getattr(model, "_supports_attention_backend", False) or _ASKS.search(
        inspect.getsource(sys.modules[model.__module__])
    ):
        return "sdpa"
    return register_document_attention()


def register_document_attention() -> str:
    """Register :func:`trainwright.document_attention` with transformers; returns its ``attn_implementation``.

    A mask that is causal within documents becomes their starts; any other is left to ``sdpa``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name = document_attention.__name__
    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, _mask)
    return name


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    forward: Any = sdpa_attention_forward
    if attention_mask is None or attention_mask.dtype is not torch.int64:
        return forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    if any(options.get(name) is not None for name in ("position_bias", "softcap", "cache")):
        return forward(module, query, key, value, document_mask(attention_mask), **options)  # type: ignore[no-any-return]
    dropout, scale = options.get("dropout", 0.0), options.get("scaling")
    out = document_attention(query, key, value, attention_mask, dropout, scale)
    return out.transpose(1, 2).contiguous(), None


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any, device: torch.device, **options: Any
) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    plain: Any = sdpa_mask
    skips = options.get("allow_is_causal_skip", True) or options.get("use_vmap", False)
    if q_length == kv_length > 1 and not skips and options.get("attention_mask") is None:
        starts = _starts_of(mask_function, batch_size, q_length, torch.device(device))
        if starts is not None:
            return starts
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    mask: Tensor | None = plain(**sizes, mask_function=mask_function, device=device, **options)
    return mask


def _starts_of(sees: Any, batch_size: int, length: int, device: torch.device) -> Tensor | None:
    """Return the starts of documents ``(B, 1, 1, T)``; ``None`` if the mask is not causal within documents.

    Args:
        sees: ``(sequence, head, query, key) -> bool``, on tensors of indices.
    """
    rows = torch.arange(batch_size, device=device)[:, None]
    positions = torch.arange(length, device=device)[None]
    before, after = (positions - 1).clamp(min=0), (positions + 1).clamp(max=length - 1)
    goes_on = sees(rows, 0, positions, before) & (positions > 0)
    starts = torch.where(goes_on, 0, positions).cummax(1).values
    outside = (starts - 1).clamp(min=0)
    is_causal = ~sees(rows, 0, positions, after) | (after == positions)
    sees_first, sees_outside = sees(rows, 0, positions, starts), sees(rows, 0, positions, outside) & (starts > 0)
    fits = (is_causal & sees_first & ~sees_outside).all()
    is_readable = type(fits) is Tensor and not fits.is_meta and not torch.compiler.is_compiling()
    return starts[:, None, None] if is_readable and bool(fits) else None
