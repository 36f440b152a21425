"""Continue token ids with any causal language model, inside a step of any layout."""

# Shape suffixes: B = prompts, T = positions, V = vocabulary.

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from trainwright.recipes.generation.sampling import Sampling

# The name of the phase of a run in which no step is under way.
_IDLE = "idle"


def generate(
    module: LightningModule,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | None = None,
    indices: Sequence[int] | None = None,
) -> list[list[int]]:
    """Continue each prompt. Call it in eval mode, within a step that the strategy runs (see :func:`continued`).

    A model of Hugging Face transformers (``module.model``, or any part of ``module``) runs its own ``generate``: with a
    cache of keys and values, left padding, and the end tokens and processors of its ``generation_config``. Any other
    module must map ids ``(B, T)`` to logits ``(B, T, V)`` and have ``seq_len``, the positions that it sees: it runs
    without a cache, on the last ``seq_len`` ids.

    Args:
        module: the module of the run.
        prompts: ids of each prompt, at least one; lengths may differ.
        sampling: ``None``: 100 new tokens, greedy.
        indices: number of each prompt among all, which decides its random numbers; ``None``: 0, 1, ...

    Returns:
        The new ids of each prompt; an end token, where the text ends before ``max_new_tokens``, is the last of them.

    Raises:
        TypeError: if ``module`` cannot generate.
        ValueError: if a text would be longer than a Hugging Face model's ``max_position_embeddings``.
    """
    sampling = sampling or Sampling()
    trainer = _trainer_of(module)
    choose = _Choice(sampling, range(len(prompts)) if indices is None else indices, _heartbeat(trainer))
    model = next((part for part in module.modules() if _generates(part)), None)
    if model is not None:
        traits = getattr(getattr(trainer, "strategy", None), "traits", None)  # of a strategy of this project
        return _by_transformers(model, prompts, choose, module.device, getattr(traits, "forward_is_collective", False))
    if isinstance(getattr(module, "seq_len", None), int):
        return _in_window(module, prompts, choose, module.device)
    raise TypeError(
        f"{type(module).__name__} cannot generate text: none of its parts is a causal language model of Hugging Face "
        "transformers, and it has no seq_len, the number of ids that its forward sees."
    )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Compute in eval mode without gradients between two steps of a run; each part's mode is as before afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        # no_grad rather than inference_mode: sharded parameters are gathered into buffers that training uses again.
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def continued(
    trainer: Any, module: LightningModule, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None
) -> list[list[int]]:
    """Run :func:`generate` between two steps of a run, through the strategy, which alone can use a sharded model.

    A collective: all ranks call it with the same prompts. The module's mode is as before afterwards.

    Args:
        trainer: of the run, while it fits, validates, tests or predicts.
        module: its module.
        prompts, sampling: see :func:`generate`.
    """
    held = module.__dict__.get("predict_step")
    module.__dict__["predict_step"] = lambda batch, batch_idx: generate(module, *batch)
    try:
        with evaluating(module):
            new: list[list[int]] = trainer.strategy.predict_step((prompts, sampling), 0)
    finally:
        del module.__dict__["predict_step"]
        if held is not None:
            module.__dict__["predict_step"] = held
    return new


class _Choice:
    """Scores of which the largest is the token to take, called for each new token as transformers' processors are.

    Args:
        sampling: how tokens are chosen.
        indices: number of each prompt among all.
        heartbeat: called for each token.
    """

    def __init__(self, sampling: Sampling, indices: Sequence[int], heartbeat: Callable[[], None]) -> None:
        self.sampling, self._heartbeat = sampling, heartbeat
        # On the CPU: the numbers are then the same on every device.
        self._generators = [(zlib.crc32(f"{sampling.seed} {index}".encode()), torch.Generator()) for index in indices]

    def begin(self) -> _Choice:
        """Seed the draws, before the first token; returns itself."""
        for seed, generator in self._generators:
            generator.manual_seed(seed)
        return self

    def __call__(self, ids_BT: Tensor, scores_BV: Tensor) -> Tensor:  # noqa: N803
        self._heartbeat()
        if self.sampling.temperature == 0:
            return scores_BV
        chances_BV = F.softmax(scores_BV.float() / self.sampling.temperature, dim=-1)  # noqa: N806
        if self.sampling.top_p < 1:
            largest_BV, order_BV = chances_BV.sort(descending=True)  # noqa: N806
            is_rest = largest_BV.cumsum(-1) - largest_BV >= self.sampling.top_p
            chances_BV = chances_BV.masked_fill(is_rest.scatter(1, order_BV, is_rest), 0)  # noqa: N806
        # The first of exponential waiting times is a draw, and rounding of the chances hardly ever changes which.
        waits = [torch.empty(chances_BV.size(1)).exponential_(generator=each) for _, each in self._generators]
        return chances_BV / torch.stack(waits).to(chances_BV.device)


def _by_transformers(
    model: Any, prompts: Sequence[Sequence[int]], choose: _Choice, device: torch.device, is_collective: bool
) -> list[list[int]]:
    config, new = model.generation_config, choose.sampling.max_new_tokens
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = [end for end in ends if end is not None]
    pad = next(each for each in (config.pad_token_id, *ends, 0) if each is not None)
    longest, most = max(map(len, prompts)), getattr(model.config, "max_position_embeddings", None)
    if isinstance(most, int) and longest + new > most:
        raise ValueError(
            f"A prompt of {longest} tokens and max_new_tokens={new} are more than the {most} positions of "
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
        do_sample=False,  # `choose` draws
        num_beams=1,
        pad_token_id=pad,
        return_dict_in_generate=False,
        # Ranks with other prompts may need more passes, in which all ranks take part.
        synced_gpus=is_collective,
    )
    try:
        found = run(use_cache=True, logits_processor=[choose.begin()])
    except RuntimeError as error:
        if "use_cache=False" not in str(error):  # a pipeline refuses a cache of other states, on all ranks alike
            raise
        rank_zero_warn(f"{type(model).__name__} generates without a cache, which this layout refuses: {error}")
        found = run(use_cache=False, logits_processor=[choose.begin()])
    return [_until_end(row, ends) for row in found[:, longest:].tolist()]


def _until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    return ids[: next((place + 1 for place, each in enumerate(ids) if each in ends), len(ids))]


def _in_window(
    module: LightningModule, prompts: Sequence[Sequence[int]], choose: _Choice, device: torch.device
) -> list[list[int]]:
    """Every pass has the shape ``(B, seq_len)``: no rank takes fewer passes than others, and nothing is compiled twice.

    Zeros behind a text change nothing for a causal model. A text that fills the window loses its first id for each new
    one.
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
    with suppress(RuntimeError):  # there is none
        return module.trainer
    return None


def _heartbeat(trainer: Any) -> Callable[[], None]:
    """Return what to call for each token: all together may take longer than a step that hangs."""
    phases = getattr(trainer, "phases", None)  # of a Trainer of this project
    return (lambda: None) if phases is None else partial(phases.begin, _IDLE)
