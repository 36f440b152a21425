"""Words of other libraries for names of this one, and the answers to them, on the command line and in Python."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

# One meaning between semicolons: its names here, on the command line and in Python, then those of other libraries.
# A word with several meanings is answered with all of them. Forms such as num_gpus and tp_size are left to `_plain`.
_SAME = """
devices gpus ngpus processes nproc_per_node tpu_cores ipus; nodes nnodes; lr learning_rate; workers; optimizer optim
; epochs epoch train_epochs; steps train_steps training_steps iters iterations; seed seed_everything random_seed
; micro_batch_size batch_size train_batch_size; global_batch_size batch_size train_batch_size
; accumulation.steps accumulate_grad_batches gradient_accumulation_steps; precision dtype mixed_precision
; gradient_clip_val grad_clip gradient_clipping clip_grad_norm grad_norm; ckpt_path resume_from_checkpoint
; run_dir default_root_dir output_dir log_dir hydra.run.dir hydra.sweep.dir; launch launcher hydra/launcher
; train_dataloaders dataloaders train_dataloader dataloader train_loader loader
; recipe experiment config config_name datamodule dataset; enable_model_summary weights_summary
; fit train training; test eval evaluate; validate val eval evaluate; predict infer inference
; checkpoint enable_checkpointing checkpoint_callback; monitor enable_progress_bar progress_bar_refresh_rate
; single single_device none; ddp dp data_parallel ddp2 horovod ddp_find_unused_parameters_true
; deepspeed_json deepspeed; zero1 zero deepspeed; zero2 shard_grad_op zero deepspeed
; zero3 fsdp fsdp1 fsdp2 fsdp_cpu full_shard hsdp zero deepspeed
; hybrid model_parallel 2d 3d hybrid_3d megatron; tensor tp model_parallel megatron; pipeline pp model_parallel
; context cp sp sequence ulysses; expert ep moe; parameter_server ps async; local_sgd post_local_sgd
; shard dp_shard fsdp; replicate dp_replicate; 16-mixed 16 fp16 float16 half amp mixed; fp16 float16 half
; bf16-mixed bf16 bfloat16 amp mixed; bf16 bfloat16; fit train run
; validate eval evaluate val; predict infer inference; 32 32-true fp32 float32 float full single; 64-true fp64 float64
"""
# What to do where the interface in use has no name for the word.
_ADVICE = {
    "hydra/sweeper": "type -m and the values of a key, such as -m seed=0,1",
    "lr": "it is an argument of the optimizer or of the module",
    "tensor": "for several axes, choose the strategy hybrid (HybridStrategy), which takes tensor, pipeline and context",
    "ckpt_path": "it is an argument of fit, validate, test and predict: type trainer.fit(module, ckpt_path=...)",
}


class Vocabulary(NamedTuple):  # without dataclasses, whose import takes 10 ms of each command's start
    """The words of one interface.

    Attributes:
        names: of options and arguments, dotted where they are typed so.
        choices: words that some of them take.
        show: returns a value as it is typed.
    """

    names: Collection[str]
    choices: Mapping[str, Collection[str]] = {}
    show: Callable[[Any], str] = repr

    def meaning(self, word: str, value: Any = None) -> str | None:
        """Return what an unknown word is called and what to type, or what to do instead; ``None`` if it has no meaning.

        Args:
            word: a name, or a choice, also used as a name like ``fp16=True``.
            value: given for the name.
        """
        names = [name for name in names_for(word, self.names) if name != word]
        choices = [] if names else [(n, each) for n, words in self.choices.items() for each in names_for(word, words)]
        found = {n: self._typed(n, value) for n in names} | {each: self._typed(n, each) for n, each in choices}
        if found:
            return f"{word} is called {' or '.join(found)} here; type {' or '.join(found.values())}"
        return next((_ADVICE[name] for name in names_for(word, _ADVICE)), None)

    def _typed(self, name: str, value: Any) -> str:
        choices = self.choices.get(name, (value,))
        meant = [value] if value in choices else names_for(str(value), choices)
        return " or ".join(f"{name}={self.show(each)}" for each in meant) or f"{name}=... ({', '.join(choices)})"


def names_for(word: str, allowed: Iterable[str]) -> list[str]:
    """Return the allowed names that mean the same as a word; without any, the dotted ones that end with such a name.

    Args:
        word: in any case, with any dashes; of a dotted one the last part counts as well.
        allowed: names of one interface.
    """
    forms = {_plain(word), _plain(word.rpartition(".")[2])}
    same = dict.fromkeys([*(each for row in _MEANINGS if forms & set(row) for each in row), *forms])
    known = {name: _plain(name) for name in allowed}
    found = [name for each in same for name, plain in known.items() if plain == each]
    return found or [name for name in known if _plain(name.rpartition(".")[2]) in same]


def _plain(word: str) -> str:
    """Return a word in lower case, without dashes and what only says that it is a number of something."""
    word = re.sub("^deepspeed_stage_", "zero", word.lower().replace("-", "_"))
    parts = r"^(num|n|max)_|_(size|degree|offload)$|(?<=.)_model_parallel|(?<!data)(?<!model)_parallel|[\W_]"
    return re.sub(parts, "", word)


_MEANINGS = [list(map(_plain, meaning.split())) for meaning in _SAME.split(";")]
