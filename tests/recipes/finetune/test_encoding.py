import json
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.finetune.fixtures import byte_tokenizer
from trainwright.recipes.finetune.encoding import CHATML, NOT_TRAINED, encode_chat, encode_text
from trainwright.recipes.finetune.records import RecordsError, messages_of, pair_of, read_records

PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo!"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "é"},
]


def test_answers_are_trained() -> None:
    """A token is a byte or one of the markers.

    ``<|im_start|>user\\nHi<|im_end|>\\n`` has 1 + 5 + 2 + 1 + 1 = 10 tokens, ``<|im_start|>assistant\\n`` 11, so the
    first answer ``Yo!<|im_end|>`` is tokens 21 to 24; then 1 newline, 1 + 5 + 1 + 1 + 1 = 9 of the next question, and
    11: the second, ``é`` in two bytes and its marker, is tokens 46 to 48 of 50.
    """
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    ids, targets = encode_chat(tokenizer, TALK)
    assert len(ids) == len(targets) == 50
    assert [place for place, count in enumerate(targets) if count != NOT_TRAINED] == [21, 22, 23, 24, 46, 47, 48]
    assert [count for count in targets if count != NOT_TRAINED] == [1, 1, 1, 10, 2, 0, 10]
    assert tokenizer.decode(ids[21:25]) == "Yo!<|im_end|>"


def test_template_without_generation_marks() -> None:
    """The newline after an answer belongs to it."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PLAIN
    _, targets = encode_chat(tokenizer, TALK)
    assert [n for n, count in enumerate(targets) if count != NOT_TRAINED] == [21, 22, 23, 24, 25, 46, 47, 48, 49]


def test_template_that_rewrites_messages_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + PLAIN
    with pytest.raises(RecordsError, match="changes the text before message 1"):
        encode_chat(tokenizer, TALK)
    tokenizer.chat_template = None
    with pytest.raises(RecordsError, match=r"data\.chat_template=chatml"):
        encode_chat(tokenizer, TALK)


def test_text_is_trained_with_its_end() -> None:
    tokenizer = byte_tokenizer()
    ids, targets = encode_text(tokenizer, "aé")
    assert (len(ids), ids[-1], targets) == (4, tokenizer.eos_token_id, [1, 2, 0, 0])


@pytest.mark.parametrize("record", [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"prompt": "q", "completion": "a"},
    {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
    {"instruction": "q", "output": "a"},
    {"instruction": "q", "input": "", "response": "a"},
])  # fmt: skip
def test_formats_of_a_conversation(record: dict[str, Any]) -> None:
    assert messages_of(record) == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    "record", [{}, {"messages": []}, {"messages": [{"role": "user", "content": "q"}]}, {"text": "x"}]
)
def test_invalid_conversations(record: dict[str, Any]) -> None:
    with pytest.raises(RecordsError):
        messages_of(record)


def test_preference_pair() -> None:
    chosen, rejected = pair_of({"prompt": "q", "chosen": "a", "rejected": "b"})
    assert [each["content"] for each in chosen + rejected] == ["q", "a", "q", "b"]
    with pytest.raises(RecordsError, match="chosen and rejected"):
        pair_of({"prompt": "q", "chosen": "a"})


def test_file_formats(tmp_path: Path) -> None:
    import datasets

    record = {"prompt": "q", "completion": "a"}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(record)}\n\n{json.dumps(record)}\n")
    (tmp_path / "b.json").write_text(json.dumps([record]))
    assert list(read_records(str(tmp_path))) == [record] * 3
    datasets.Dataset.from_list([record] * 2).save_to_disk(tmp_path / "saved")
    assert list(read_records(str(tmp_path / "saved"))) == [record] * 2
    (tmp_path / "c.txt").write_text("text")
    assert list(read_records(str(tmp_path / "c.txt"))) == [{"text": "text"}]
    (tmp_path / "d.jsonl").write_text("{]\n")
    for bad, why in (("d.jsonl", "not JSON"), ("none", "no file of records")):
        with pytest.raises(RecordsError, match=why):
            list(read_records(str(tmp_path / bad)))
