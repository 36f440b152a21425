"""Words of other libraries for names of this one, and the answers to them, on the command line and in Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# One meaning between semicolons: its names here, on the command line and in Python, and those of other libraries.
# A word with several meanings is answered with all of them.
_SAME = """
devices gpus num_gpus n_gpus ngpus num_devices num_processes nproc_per_node tpu_cores ipus
; nodes num_nodes nnodes n_nodes num_machines; seed seed_everything random_seed manual_seed
; max_epochs max_epoch epochs epoch num_epochs n_epochs num_train_epochs
; max_steps steps num_steps n_steps train_steps total_steps training_steps max_iters iterations; lr learning_rate
; micro_batch_size batch_size train_batch_size bs mbs per_device_train_batch_size train_micro_batch_size_per_gpu
; global_batch_size batch_size train_batch_size bs gbs effective_batch_size
; accumulation.steps accumulate_grad_batches gradient_accumulation_steps grad_accum grad_accumulation
; gradient_clip_val grad_clip gradient_clipping clip_grad max_grad_norm clip_grad_norm
; ckpt_path resume_from_checkpoint resume_from checkpoint_path load_from_checkpoint; num_workers workers
; run_dir default_root_dir output_dir log_dir save_dir work_dir hydra.run.dir hydra.sweep.dir hydra.sweep.subdir
; precision dtype torch_dtype mixed_precision; strategy distributed_backend parallelism
; recipe experiment config config_name data_module datamodule dataset net network; optimizer optim opt
; enable_checkpointing checkpoint_callback; enable_model_summary weights_summary
; enable_progress_bar progress_bar_refresh_rate; train_dataloaders train_dataloader train_loader
; val_dataloaders val_dataloader val_loader valid_loader; dataloaders dataloader test_dataloader test_loader
; single single_device none; ddp dp data_parallel ddp2 horovod distributed; deepspeed_json deepspeed
; zero1 deepspeed_stage_1 deepspeed_stage_1_offload stage1 zero_redundancy_optimizer zero deepspeed
; zero2 deepspeed_stage_2 deepspeed_stage_2_offload stage2 shard_grad_op zero deepspeed
; zero3 deepspeed_stage_3 deepspeed_stage_3_offload stage3 zero deepspeed fsdp fsdp1 fsdp2 fsdp_cpu_offload full_shard
; hybrid hsdp hybrid_shard model_parallel 2d 3d hybrid_3d megatron nd_parallel
; tensor tp tensor_parallel tensor_parallel_size tp_size tensor_model_parallel_size model_parallel megatron
; pipeline pp pipeline_parallel pipeline_parallel_size pp_size pipeline_model_parallel_size model_parallel
; context cp context_parallel context_parallel_size cp_size sp sequence_parallel ulysses ring_attention
; expert ep expert_parallel expert_parallel_size ep_size expert_model_parallel_size moe
; shard fsdp_size dp_shard data_parallel_shard_degree; replicate dp_replicate data_parallel_replicate_degree
; parameter_server ps async asynchronous async_sgd; local_sgd post_local_sgd
; 16-mixed 16 fp16 float16 half amp mixed; bf16-mixed bf16 bfloat16 amp mixed; bf16-true bfloat16-true pure_bf16
; 32 32-true fp32 float32 float full single; 64-true 64 fp64 float64 double; fp16 float16 half; bf16 bfloat16
"""
# What to do where the interface in use has no name for the word.
_ADVICE = {
    "hydra/launcher": "type launch=slurm, launch=ray or launch=kubernetes, or -m for several runs",
    "hydra/sweeper": "type -m and the values of a key, such as -m seed=0,1",
    "lr": "it is an argument of the optimizer or of the module",
    "batch_size": "it is an argument of the data loader",
    "ckpt_path": "it is an argument of fit, validate, test and predict: type trainer.fit(module, ckpt_path=...)",
    "enable_progress_bar": "type ~monitor.progress_bar to turn it off",
    "enable_checkpointing": "type checkpoint=none to turn it off",
}


@dataclass(frozen=True)
class Vocabulary:
    """The words of one interface.

    Attributes:
        names: of options and arguments, dotted where they are typed so.
        choices: words that some of them take.
        show: returns a value as it is typed.
    """

    names: Collection[str]
    choices: Mapping[str, Collection[str]] = field(default_factory=dict)
    show: Callable[[Any], str] = repr

    def meaning(self, word: str, value: Any) -> str | None:
        """Return what an unknown name is called and what to type, or what to do instead; ``None`` if it is no word.

        Args:
            word: the name; may also stand for a choice, like ``fp16=True``.
            value: given for it.
        """
        if found := names_for(word, self.names):
            return _called(word, found, [self._typed(name, value) for name in found])
        found = [text for name in self.choices for text in self._choices(name, word)]
        advice = next((_ADVICE[name] for name in names_for(word, _ADVICE)), None)
        return _called(word, found, found) if found else advice

    def meaning_of_value(self, name: str, value: Any) -> str | None:
        """Return what a word is called among the choices of ``name``, and what to type; ``None`` if it is no word."""
        found = names_for(str(value), self.choices.get(name, ()))
        return _called(str(value), found, self._choices(name, value)) if found else None

    def _choices(self, name: str, word: Any) -> list[str]:
        return [f"{name}={self.show(choice)}" for choice in names_for(str(word), self.choices[name])]

    def _typed(self, name: str, value: Any) -> str:
        choices = self.choices.get(name, (value,))
        typed = [f"{name}={self.show(value)}"] if value in choices else self._choices(name, value)
        return " or ".join(typed) or f"{name}=... ({', '.join(choices)})"


def names_for(word: str, allowed: Iterable[str]) -> list[str]:
    """Return the allowed names that mean the same as a word; if there is none, the dotted ones that end with such a name.

    Args:
        word: in any case, with any dashes; of a dotted one the last part counts as well.
        allowed: names of one interface.
    """
    forms = [_plain(word), _plain(word.rpartition(".")[2])]
    rows = [row for row in _MEANINGS if not row.keys().isdisjoint(forms)]
    same = [*dict.fromkeys(each for row in rows for each in row), *forms]
    known = list(allowed)
    found = [name for each in same for name in known if _plain(name) == each]
    return list(dict.fromkeys(found)) or [name for name in known if _plain(name.rpartition(".")[2]) in same]


def _called(word: str, names: list[str], typed: list[str]) -> str:
    return f"{word} is called {' or '.join(names)} here; type {' or '.join(typed)}"


def _plain(word: str) -> str:
    return re.sub(r"[\W_]", "", word.lower())


# Sets that keep their order.
_MEANINGS = [dict.fromkeys(map(_plain, meaning.split())) for meaning in _SAME.split(";")]
