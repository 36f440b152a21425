"""Module of the ``finetune`` recipe: a pretrained causal language model, trained whole or by adapters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor, nn
from torch.utils.data import default_collate

from trainwright.recipes.finetune.data import IGNORED, TokenRows
from trainwright.recipes.finetune.quantized import QuantizedSource, quantize_frozen
from trainwright.recipes.generation.generate import evaluating
from trainwright.recipes.hugging_face.causal_lm import HuggingFaceModule
from trainwright.recipes.hugging_face.chunked_logits import logits_in_chunks

Batch = Mapping[str, Tensor]
_IDLE = "idle"  # the phase of a hook
_MOST_COMPARED = 8  # documents
_TOLERANCE, _TOLERANCE_16 = 1e-4, 5e-2  # nats, in float32 and in 16-bit precision


class FineTuneModule(HuggingFaceModule):
    """Next-token prediction on rows of documents or conversations, see :class:`~.data.TokenRows`.

    Logs ``train_loss`` (nats per trained token of this rank's micro-batch), and over all validation rows ``val_loss``
    (nats per trained token), ``val_perplexity`` (its exponential) and ``val_bits_per_byte`` (bits per UTF-8 byte of
    trained text), likewise ``test_...``.

    Args:
        pretrained: see :class:`~trainwright.recipes.hugging_face.causal_lm.HuggingFaceModule`.
        adapter: ``kind`` (``lora``, ``dora`` or ``ia3``) and arguments of peft's configuration class; with
            ``quantize="nf4"`` frozen linear layers except the head have four bits (not ``dora``); ``None``: all weights
            are trained.
        meta: like there; if an adapter's initial values depend on the weights, each rank reads them whole.
        **options: see there.
    """

    def __init__(
        self, pretrained: str, adapter: Mapping[str, Any] | None = None, meta: bool | str = "auto", **options: Any
    ) -> None:
        self.adapter = None if adapter is None else dict(adapter)
        self._quantized: list[str] = []
        if self.adapter is not None and needs_weights(self.adapter):
            meta = False
        super().__init__(pretrained=pretrained, meta=meta, **options)

    def build(self) -> nn.Module:
        """Return the network with its adapter."""
        model = super().build()
        if self.adapter is None:
            return model
        adapted = with_adapter(model, self.adapter)
        if self.adapter.get("quantize"):
            self._quantized = quantize_frozen(adapted, model.get_output_embeddings())  # type: ignore[operator]
        return adapted

    def weights_as_held(self, source: Any) -> Any:
        """Return the tensors of a file in the network's format."""
        return QuantizedSource(source, self._quantized) if self._quantized else source

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # type: ignore[override]
        """Return the mean loss in nats per trained token."""
        loss = F.cross_entropy(self.logits(batch), batch["labels"].flatten(), ignore_index=IGNORED)
        self.log("train_loss", loss)
        return loss

    def logits(self, batch: Batch) -> Tensor:
        """Return float32 logits ``(B * T, V)`` of next tokens; documents of a row do not attend to each other."""
        assert self.model is not None, "configure_model has not run"
        with logits_in_chunks(self.model, self.loss_chunk):
            found = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        logits: Tensor = found.logits.flatten(0, 1).float()
        return logits

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """For rows, return the loss at each position in nats, float32 ``(B, T)``, 0 where not trained.

        For other batches see :meth:`~trainwright.recipes.language_model.LanguageModule.predict_step`.
        """
        return self._nats(batch) if isinstance(batch, dict) else super().predict_step(batch, batch_idx)

    def on_train_start(self) -> None:
        """Refuse packed rows if the documents of a row attend to each other.

        Raises:
            ValueError: if a loss differs from that of the document alone.
        """
        data = getattr(self.trainer, "datamodule", None)
        rows = getattr(data, "train", None)
        if not isinstance(rows, TokenRows):
            return
        number = max(range(len(rows)), key=lambda number: len(rows.rows[number]))
        separate = rows.separate(number, _MOST_COMPARED)
        if len(separate) < 2:
            return
        batch_size = data.batch_size  # type: ignore[union-attr]
        alone = torch.cat([each[each != 0] for each in self.losses_of(separate, range(len(separate)), batch_size)])
        packed = self.losses_of(rows, [number], batch_size)[0]
        packed = packed[packed != 0][: len(alone)]
        limit = _TOLERANCE if self.trainer.precision in ("32-true", "64-true") else _TOLERANCE_16
        if not torch.allclose(packed, alone, rtol=limit, atol=limit):
            raise ValueError(
                "data.packing=true: losses of documents in one row differ from those of the documents alone by up "
                f"to {float((packed - alone).abs().max()):.2g} nats: in {type(self.model).__name__} the documents of a "
                "row attend to each other. Type data.packing=false"
            )

    def losses_of(self, rows: TokenRows, numbers: Sequence[int], batch_size: int) -> list[Tensor]:
        """Return the losses at the positions of some rows, each float32 ``(T,)``. A collective of all ranks."""
        found: list[Tensor] = []
        for begin in range(0, len(numbers), batch_size):
            if phases := getattr(self.trainer, "phases", None):
                phases.begin(_IDLE)  # report progress to the watchdog
            chosen = list(numbers[begin : begin + batch_size])
            # Layouts may depend on the shape of a training batch.
            batch = default_collate([rows[number] for number in chosen + chosen[:1] * (batch_size - len(chosen))])
            with evaluating(self):
                values: Any = self.trainer.strategy.predict_step(move_data_to_device(batch, self.device), 0)
            found += list(values[: len(chosen)])
        return found

    def _nats(self, batch: Batch) -> Tensor:
        labels = batch["labels"]
        nats = F.cross_entropy(self.logits(batch), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return nats.view(labels.shape)

    def on_validation_epoch_end(self) -> None:
        """Log ``val_perplexity``."""
        self._log_perplexity("val")

    def on_test_epoch_end(self) -> None:
        """Log ``test_perplexity``."""
        self._log_perplexity("test")

    def _log_held_out(self, stage: str, batch: Batch) -> None:  # type: ignore[override]
        nats = self._nats(batch).sum()
        tokens, num_bytes = int((batch["labels"] != IGNORED).sum()), int(batch["num_bytes"].sum())
        # Weighted means are exact over all rows, whatever their distribution over ranks.
        self.log(f"{stage}_loss", nats / max(1, tokens), batch_size=tokens, sync_dist=True)
        bits = nats / math.log(2) / max(1, num_bytes)
        self.log(f"{stage}_bits_per_byte", bits, batch_size=num_bytes, sync_dist=True, prog_bar=True)

    def _log_perplexity(self, stage: str) -> None:
        loss = self.trainer.callback_metrics.get(f"{stage}_loss")
        if loss is not None:
            self.log(f"{stage}_perplexity", torch.exp(loss))


def needs_weights(adapter: Mapping[str, Any]) -> bool:
    """Return whether initial values of an adapter are computed from the adapted weights."""
    plain = adapter.get("init_lora_weights", True) in (True, "gaussian", "orthogonal")
    # modules_to_save copies whole weights, which four-bit layers do not have.
    copies = bool(adapter.get("quantize") and adapter.get("modules_to_save"))
    return adapter["kind"] == "dora" or copies or not plain


def with_adapter(model: nn.Module, adapter: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """Freeze a model and add an adapter.

    Args:
        model: of ``transformers``; its weights may be on the meta device.
        adapter: ``kind`` (``lora``, ``dora`` or ``ia3``) and the arguments of peft's ``LoraConfig`` or ``IA3Config``;
            ``quantize`` is ignored.
        seed: of the initial values, equal on every rank.

    Raises:
        ValueError: if peft refuses the arguments.
    """
    import peft

    options = {key: value for key, value in adapter.items() if value is not None and key != "quantize"}
    kind = options.pop("kind")
    if kind == "ia3":
        config: Any = peft.IA3Config(task_type="CAUSAL_LM", **options)
    else:
        config = peft.LoraConfig(task_type="CAUSAL_LM", use_dora=kind == "dora", **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The caller may set the meta device as default; peft puts an adapter on its layer's device.
        adapted: nn.Module = peft.get_peft_model(model, config)
    for name, layer in adapted.named_modules():
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
            _initialize(name, layer, config, seed)
    return adapted


def _initialize(name: str, layer: Any, config: Any, seed: int) -> None:
    """Initialize an adapter on the meta device, whose reset is not a module's own."""
    parts = [getattr(layer, part) for part in layer.adapter_layer_names if isinstance(getattr(layer, part), nn.Module)]
    if not any(tensor.is_meta for part in parts for tensor in part.parameters()):
        return
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "big"))
        for part in parts:
            part.to_empty(device="cpu")
        if hasattr(layer, "reset_lora_parameters"):
            layer.reset_lora_parameters("default", config.init_lora_weights)
        else:
            layer.reset_ia3_parameters("default")
