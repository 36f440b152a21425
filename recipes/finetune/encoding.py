"""Encoding of records as tokens, with masks of trained tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainwright.recipes.finetune.records import Messages, RecordsError, messages_of, pair_of, text_of

NOT_TRAINED = -1
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Chat template named ``chatml``."""


class Encoded(NamedTuple):
    """Tokens of one document."""

    ids: list[int]
    targets: list[int]
    """UTF-8 bytes of each token, or ``NOT_TRAINED``."""


def load_tokenizer(folder: Path, chat_template: str | None = None) -> Any:
    """Load a fast tokenizer of Hugging Face from a folder, without executing its code.

    Args:
        folder: with a ``tokenizer.json``.
        chat_template: ``None``: the tokenizer's own; ``"chatml"``; or a file with a Jinja template.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if chat_template is not None:
        is_name = chat_template == "chatml"
        tokenizer.chat_template = CHATML if is_name else Path(chat_template).expanduser().read_text(encoding="utf-8")
    return tokenizer


def encode_all(records: Iterator[Mapping[str, Any]], tokenizer: Any, format: str) -> Iterator[Encoded]:
    """Encode records in order; a preference pair gives two documents, the chosen one first.

    Args:
        records: see :mod:`trainwright.recipes.finetune.records`.
        tokenizer: a fast tokenizer.
        format: ``"text"``: all tokens are trained, and the end-of-text token is appended; ``"chat"`` and
            ``"preference"``: the tokens of the assistant's messages are trained.
    """
    encode: Callable[[Mapping[str, Any]], Sequence[Encoded]] = {
        "text": lambda record: [encode_text(tokenizer, text_of(record))],
        "chat": lambda record: [encode_chat(tokenizer, messages_of(record))],
        "preference": lambda record: [encode_chat(tokenizer, messages) for messages in pair_of(record)],
    }[format]
    for record in records:
        yield from encode(record)


def encode_text(tokenizer: Any, text: str) -> Encoded:
    """Encode a text with the tokenizer's special tokens and the end-of-text token; all tokens are trained."""
    found = tokenizer(text, return_offsets_mapping=True)
    ids = list(found["input_ids"])
    targets = _bytes_of(text, found["offset_mapping"])
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
        targets.append(0)
    return Encoded(ids, targets)


def encode_chat(tokenizer: Any, messages: Messages) -> Encoded:
    """Encode a conversation by the tokenizer's chat template; the assistant's messages are trained.

    The assistant's text is marked by ``{% generation %}`` in the template. Without it, a message is what the template
    appends to earlier messages and the generation prompt; a template that rewrites earlier messages is refused.

    Raises:
        RecordsError: if the tokenizer has no chat template, or the template does not show where answers begin.
    """
    if not tokenizer.chat_template:
        raise RecordsError(
            "The tokenizer has no chat template. Type data.chat_template=chatml, or data.chat_template=/path/to/a "
            "file with a Jinja template"
        )
    text, spans = _rendered(tokenizer, messages)
    found = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    offsets = found["offset_mapping"]
    answers = iter(sorted(spans))
    begin, end = next(answers, (len(text), len(text)))
    targets = _bytes_of(text, offsets)
    for position, (first, _) in enumerate(offsets):
        while first >= end and end < len(text):
            begin, end = next(answers, (len(text), len(text)))
        if not begin <= first < end:
            targets[position] = NOT_TRAINED
    return Encoded(list(found["input_ids"]), targets)


def _rendered(tokenizer: Any, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and character spans of the assistant's messages."""
    render = tokenizer.apply_chat_template
    if re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template):
        from transformers.utils.chat_template_utils import render_jinja_template

        render_template: Any = render_jinja_template
        texts, marked = render_template(
            conversations=[messages],
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        return texts[0], [(int(begin), int(end)) for begin, end in marked[0]]
    text, spans = str(render(messages, tokenize=False)), list[tuple[int, int]]()
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:position], tokenize=False, add_generation_prompt=True)
        until = render(messages[: position + 1], tokenize=False)
        if not (text.startswith(until) and until.startswith(before)):
            raise RecordsError(
                f"The chat template changes the text before message {position} ({message['role']}) of a conversation, "
                "so the answer cannot be located. Put {% generation %} around answers in a copy of the "
                "template and type data.chat_template=/path/to/it"
            )
        spans.append((len(before), len(until)))
    return text, spans


def _bytes_of(text: str, offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return the UTF-8 bytes that each token adds; tokens within one character share its bytes."""
    ends = [0]
    for character in text:
        ends.append(ends[-1] + len(character.encode(errors="surrogatepass")))
    done, found = 0, []
    for _, end in offsets:
        found.append(max(0, ends[end] - done))
        done = max(done, ends[end])
    return found
