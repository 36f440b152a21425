"""A small pretrained model with a tokenizer, conversations and preference pairs, all made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything

from trainwright.recipes.finetune.encoding import CHATML

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer() -> Any:
    """A tokenizer whose tokens are bytes, but for three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    bare.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=SPECIAL[0], pad_token=SPECIAL[0])


def write_base(folder: Path, family: str = "llama", **sizes: Any) -> Path:
    """Write a model with its tokenizer and chat template as ``save_pretrained`` does."""
    import transformers

    seed_everything(5, verbose=False)
    given: dict[str, Any] = {
        "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, **sizes,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **given)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


def write_chats(file: Path, number: int = 40, even: bool = False) -> Path:
    """Write conversations of different lengths, or all of one length."""
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"{n} + {n}?"},
                {"role": "assistant", "content": f"{'=' * (0 if even else n % 7)} {2 * n}"},
            ]
        }
        for n in (range(10, 50) if even else range(number))
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in chats))
    return file


def write_pairs(file: Path, number: int = 40, even: bool = False) -> Path:
    """Write preference pairs of different lengths, or all of one length."""
    pairs = [
        {"prompt": f"{n} + {n}?", "chosen": f"{2 * n}", "rejected": "I refuse" * (1 if even else n % 3)}
        for n in (range(10, 50) if even else range(number))
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in pairs))
    return file
