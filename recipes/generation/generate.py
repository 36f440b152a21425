"""Continue token ids with any causal language model, within a step of any layout."""

# Shape suffixes: B = prompts, T = positions, V = vocabulary.

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from trainwright.recipes.generation.sampling import Sampling

# Name of the phase between steps.
_IDLE = "idle"


def generate(
    module: LightningModule,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | None = None,
    indices: Sequence[int] | None = None,
) -> list[list[int]]:
    """Continue prompts. Call in eval mode, within a step run by the strategy (see :func:`continued`).

    A model of Hugging Face transformers (any submodule of ``module``) runs its own ``generate``: with a key/value
    cache, left padding, and the end tokens and processors of its ``generation_config``. Any other module must map ids
    ``(B, T)`` to logits ``(B, T, V)`` and have ``seq_len``, its context length: it runs without a cache, on the last
    ``seq_len`` ids.

    Args:
        module: the module of the run.
        prompts: ids of each prompt, at least one; lengths may differ.
        sampling: ``None``: 100 new tokens, greedy.
        indices: global index of each prompt, which seeds its random numbers; ``None``: 0, 1, ...

    Returns:
        The new ids of each prompt, including the end token if the text ends before ``max_new_tokens``.

    Raises:
        TypeError: if ``module`` cannot generate.
        ValueError: if a text would exceed a Hugging Face model's ``max_position_embeddings``.
    """
    sampling = sampling or Sampling()
    trainer = _trainer_of(module)
    choose = _SamplingProcessor(sampling, range(len(prompts)) if indices is None else indices, _heartbeat(trainer))
    model = next((part for part in module.modules() if _generates(part)), None)
    if model is not None:
        traits = getattr(getattr(trainer, "strategy", None), "traits", None)  # only Trainwright's strategies have it
        return _by_transformers(model, prompts, choose, module.device, getattr(traits, "forward_is_collective", False))
    if isinstance(getattr(module, "seq_len", None), int):
        return _in_window(module, prompts, choose, module.device)
    raise TypeError(
        f"{type(module).__name__} cannot generate text: no submodule is a causal language model of Hugging Face "
        "transformers, and it has no seq_len, the context length of its forward."
    )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch to eval mode without gradients and compiled code between two steps, and restore modes afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        # Compiled blocks would be compiled anew for each length. Importing the compiler takes seconds.
        stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        # Not inference_mode: sharded parameters are gathered into buffers that training reuses.
        with torch.no_grad(), stance:
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def continued(
    trainer: Any, module: LightningModule, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None
) -> list[list[int]]:
    """Run :func:`generate` between two steps of a run, through the strategy, which a sharded model needs.

    A collective: all ranks call it with the same prompts. The module's mode is restored.

    Args:
        trainer: of the run, while it fits, validates, tests or predicts.
        module: its module.
        prompts, sampling: see :func:`generate`.
    """
    original = module.__dict__.get("predict_step")
    module.__dict__["predict_step"] = lambda batch, batch_idx: generate(module, *batch)
    try:
        with evaluating(module):
            new: list[list[int]] = trainer.strategy.predict_step((prompts, sampling), 0)
    finally:
        del module.__dict__["predict_step"]
        if original is not None:
            module.__dict__["predict_step"] = original
    return new


class _SamplingProcessor:
    """Logits processor whose largest score is the next token.

    Args:
        sampling: how tokens are chosen.
        indices: global index of each prompt.
        heartbeat: called for each token.
    """

    def __init__(self, sampling: Sampling, indices: Sequence[int], heartbeat: Callable[[], None]) -> None:
        self.sampling, self._heartbeat = sampling, heartbeat
        # CPU generators give the same numbers on every device.
        self._generators = [(zlib.crc32(f"{sampling.seed} {index}".encode()), torch.Generator()) for index in indices]

    def begin(self) -> _SamplingProcessor:
        """Seed the generators before the first token and return itself."""
        for seed, generator in self._generators:
            generator.manual_seed(seed)
        return self

    def __call__(self, ids_BT: Tensor, scores_BV: Tensor) -> Tensor:  # noqa: N803
        self._heartbeat()
        if self.sampling.temperature == 0:
            return scores_BV
        probs_BV = F.softmax(scores_BV.float() / self.sampling.temperature, dim=-1)  # noqa: N806
        if self.sampling.top_p < 1:
            largest_BV, order_BV = probs_BV.sort(descending=True)  # noqa: N806
            is_rest = largest_BV.cumsum(-1) - largest_BV >= self.sampling.top_p
            probs_BV = probs_BV.masked_fill(is_rest.scatter(1, order_BV, is_rest), 0)  # noqa: N806
        # Sampling by exponential races is robust to rounding of the probabilities.
        waits = [torch.empty(probs_BV.size(1)).exponential_(generator=each) for _, each in self._generators]
        return probs_BV / torch.stack(waits).to(probs_BV.device)


def _by_transformers(
    model: Any, prompts: Sequence[Sequence[int]], choose: _SamplingProcessor, device: torch.device, is_collective: bool
) -> list[list[int]]:
    config, new = model.generation_config, choose.sampling.max_new_tokens
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = [end for end in ends if end is not None]
    pad = next(each for each in (config.pad_token_id, *ends, 0) if each is not None)
    longest, most = max(map(len, prompts)), getattr(model.config, "max_position_embeddings", None)
    if isinstance(most, int) and longest + new > most:
        raise ValueError(
            f"A prompt of {longest} tokens and max_new_tokens={new} exceed the {most} positions of "
            f"{type(model).__name__} (max_position_embeddings). Set max_new_tokens to at most "
            f"{max(most - longest, 0)}, or shorten the prompt."
        )
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    ids_BT = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)  # noqa: N806
    run = partial(
        model.generate,
        input_ids=ids_BT,
        attention_mask=(torch.arange(longest, device=device) >= longest - lengths[:, None]).long(),
        max_new_tokens=new,
        do_sample=False,  # `choose` samples
        num_beams=1,
        pad_token_id=pad,
        return_dict_in_generate=False,
        # Ranks with other prompts may need more passes, which are collectives.
        synced_gpus=is_collective,
    )
    try:
        found = run(use_cache=True, logits_processor=[choose.begin()])
    except RuntimeError as error:
        if "use_cache=False" not in str(error):  # a pipeline refuses caches of other states, on all ranks alike
            raise
        rank_zero_warn(f"{type(model).__name__} generates without a cache, which this layout refuses: {error}")
        found = run(use_cache=False, logits_processor=[choose.begin()])
    return [_until_end(row, ends) for row in found[:, longest:].tolist()]


def _until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    return ids[: next((place + 1 for place, each in enumerate(ids) if each in ends), len(ids))]


def _in_window(
    module: LightningModule, prompts: Sequence[Sequence[int]], choose: _SamplingProcessor, device: torch.device
) -> list[list[int]]:
    """Generate with passes of constant shape ``(B, seq_len)``, so all ranks run equally many and compile once.

    Trailing zeros do not affect a causal model. A text that fills the window drops its first id for each new one.
    """
    window: Any = module.seq_len
    choose.begin()
    texts = [list(prompt) for prompt in prompts]
    for _ in range(choose.sampling.max_new_tokens):
        seen = [text[-window:] for text in texts]
        ids_BT = torch.tensor([each + [0] * (window - len(each)) for each in seen], device=device)  # noqa: N806
        logits_BTV: Tensor = module(ids_BT)  # noqa: N806
        scores_BV = torch.stack([logits_BTV[row, len(each) - 1] for row, each in enumerate(seen)])  # noqa: N806
        for text, new in zip(texts, choose(ids_BT, scores_BV).argmax(dim=-1).tolist(), strict=True):
            text.append(new)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _generates(part: Any) -> bool:
    return hasattr(part, "generation_config") and callable(getattr(part, "generate", None))


def _trainer_of(module: LightningModule) -> Any:
    with suppress(RuntimeError):  # no trainer attached
        return module.trainer
    return None


def _heartbeat(trainer: Any) -> Callable[[], None]:
    """Return a function to call for each token, since all tokens may take longer than the limit for a hanging step."""
    phases = getattr(trainer, "phases", None)  # only Trainwright's Trainer has it
    return (lambda: None) if phases is None else partial(phases.begin, _IDLE)
