"""The Trainer of transformers with peft, alone or for torchrun."""

import os

from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers.sides.finetune.given import build_model, rows
from benchmarks.peers.task import BETAS, CLIP, LR, TASK
from benchmarks.peers.turns import Turns  # bench


class MeasuredTrainer(Trainer):
    """Keeps the loss of the last step, which callbacks are not given."""

    def training_step(self, *args, **options):
        """As in transformers."""
        self.last_loss = super().training_step(*args, **options)
        return self.last_loss


class TurnsAtStepEnd(TrainerCallback):
    """Tells the benchmark of every step."""

    def on_step_end(self, args, state, control, **options):
        """The optimizer has stepped."""
        turns.step(trainer.last_loss)


turns = Turns()  # bench
arguments = TrainingArguments(
    output_dir="run",
    use_cpu=True,
    per_device_train_batch_size=TASK.batch // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=TASK.total,
    train_sampling_strategy="sequential",
    remove_unused_columns=False,
    optim="adamw_torch",
    learning_rate=LR,
    adam_beta1=BETAS[0],
    adam_beta2=BETAS[1],
    weight_decay=0.0,
    lr_scheduler_type="constant",
    max_grad_norm=CLIP,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = MeasuredTrainer(build_model(), arguments, train_dataset=rows(), callbacks=[TurnsAtStepEnd()])
trainer.train()
