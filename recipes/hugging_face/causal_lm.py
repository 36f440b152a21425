"""The ``hf_causal_lm`` recipe's module: any causal language model of Hugging Face transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.recipes.language_model import LanguageModule, OptimizerFactory

ATTENTION = "sdpa"
"""torch's own attention, which a context axis can split and a GPU has quick kernels for."""


class HuggingFaceModule(LanguageModule):
    """Next-token prediction by a model of ``transformers``, from its configuration or from a folder.

    Nothing is fetched from a network and nothing that is loaded runs code: weights come from safetensors, classes from
    the installed ``transformers`` alone. Logs what :class:`~trainwright.recipes.language_model.LanguageModule` logs.

    Args:
        config: ``model_type`` (such as ``llama``) and sizes by the names of that model's configuration; with
            ``pretrained``: values that take the place of those in the folder, without ``model_type``.
        pretrained: a folder that ``save_pretrained`` has written; ``None``: random initial weights.
        seq_len: tokens that a window trains.
        optimizer, warmup_steps, schedule_steps, final_lr_factor: see
            :class:`~trainwright.recipes.language_model.LanguageModule`.
        meta: build the model in ``configure_model`` without memory, for a strategy that fills it in piece by piece;
            not with ``pretrained``, whose weights every rank reads whole.

    Raises:
        ModuleNotFoundError: if ``transformers`` is not installed.
        ValueError: if the arguments contradict each other, or ``transformers`` has no such causal language model.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        pretrained: str | os.PathLike[str] | None = None,
        seq_len: int = 128,
        optimizer: OptimizerFactory | None = None,
        warmup_steps: int = 20,
        schedule_steps: int | None = None,
        final_lr_factor: float = 0.1,
        meta: bool = False,
    ) -> None:
        super().__init__(seq_len, optimizer, warmup_steps, schedule_steps, final_lr_factor)
        self.config = dict(config or {})
        self.pretrained = None if pretrained is None else Path(pretrained).expanduser()
        if meta and self.pretrained is not None:
            raise ValueError(f"meta=True and pretrained={pretrained}: weights that are loaded are no initial weights.")
        if ("model_type" in self.config) == (self.pretrained is not None):
            raise ValueError(
                f"config={self.config} and pretrained={pretrained} (allowed: a config with model_type, or a folder)."
            )
        self.model: nn.Module | None = None if meta else self.build()

    def build(self) -> nn.Module:
        """A new network with random weights, or that of the folder, in float32."""
        import transformers

        sizes: dict[str, Any] = {**self.config, "use_cache": False}
        if self.pretrained is not None:
            return self._load(sizes)
        config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
        made: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, trust_remote_code=False
        )
        return made

    def _load(self, sizes: dict[str, Any]) -> nn.Module:
        import transformers
        from transformers.utils import logging

        assert self.pretrained is not None
        loaded: nn.Module
        about: Mapping[str, Any]
        both: Any  # the types of transformers know of the module alone
        had_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # every rank would draw one
        try:
            both = transformers.AutoModelForCausalLM.from_pretrained(
                self.pretrained,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation=ATTENTION,
                dtype=torch.float32,
                output_loading_info=True,
                **sizes,
            )
        finally:
            if had_bar:
                logging.enable_progress_bar()
        loaded, about = both
        if all(name in about["missing_keys"] for name, _ in loaded.named_parameters()):
            there = ", ".join(sorted(about["unexpected_keys"])[:4]) or "there are none"
            raise ValueError(
                f"pretrained={self.pretrained}: none of its tensors ({there}) is one of {type(loaded).__name__}, so "
                "all weights would be random. Give a folder that save_pretrained has written for this architecture."
            )
        return loaded.train()

    def forward(self, tokens_BT: Tensor) -> Tensor:  # noqa: N803
        """Integer ids ``(B, T)`` to logits ``(B, T, V)`` of the next token."""
        assert self.model is not None, "configure_model has not run"
        logits_BTV: Tensor = self.model(input_ids=tokens_BT, use_cache=False).logits  # noqa: N806
        return logits_BTV
