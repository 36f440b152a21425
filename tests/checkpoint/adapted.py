"""Checkpoints of a model with trained peft adapters, from real runs."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.checkpoint.saved import LanguageModule, loader
from tests.parity.harness import make_trainer
from trainwright.strategies.state.wholes import gather_tree

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, "target_modules": "all-linear", "modules_to_save": ["lm_head"]}),
    "dora": ("LoraConfig", {"r": 4, "use_dora": True, "use_rslora": True, "alpha_pattern": {"v_proj": 3}}),
    "ia3": ("IA3Config", {}),
}


class AdaptedModule(LanguageModule):
    """A language model whose adapters are trained, beside a temperature.

    Args:
        adapter: one of ``KINDS``.
        kind: of the base model.
        tied: whether its embeddings are.
    """

    def __init__(self, adapter: str, kind: str = "llama", tied: bool = False) -> None:
        super().__init__(kind, tied, 0.05)
        torch.manual_seed(6)
        self.model = adapted(self.model, *KINDS[adapter])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.hparams.learning_rate)


def adapted(base: nn.Module, config: str, options: dict[str, Any]) -> nn.Module:
    """``base`` within a ``PeftModel``."""
    import peft

    return peft.get_peft_model(base, getattr(peft, config)(task_type="CAUSAL_LM", **options))


def changed(network: nn.Module) -> nn.Module:
    """``network`` with other values of all that is trained, as if it had been trained."""
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return network


def begin_adapted(
    source: str, adapter: str, strategy: str, options: dict[str, Any], strict: bool, tied: bool = True
) -> dict[str, Tensor]:
    """Weights of a run that begins from ``source`` and does no step. To be called on every rank."""
    trainer = make_trainer(strategy, {**options, "init_from": source}, limit_val_batches=1)
    module = AdaptedModule(adapter, tied=tied)
    module.strict_loading = strict
    trainer.validate(module, loader(), verbose=False)
    return dict(trainer.strategy.whole_parameters())


def save_adapted(path: str, adapter: str, strategy: str, options: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Train an adapter for some steps and save; the whole weights. To be called on every rank."""
    trainer = make_trainer(strategy, options, max_steps=3, max_epochs=-1)
    trainer.fit(AdaptedModule(adapter), loader())
    trainer.save_checkpoint(path)
    if options:
        return dict(trainer.strategy.whole_parameters())
    return gather_tree(dict(trainer.strategy.lightning_module_state_dict()), keep=True)
