"""The tokens and labels of a run beside those of TRL's SFTTrainer: where it begins, what it learns, how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lowtide.train.chat import ChatFormat
from lowtide.train.conversations import read_conversation
from lowtide.train.corpus import open_corpus
from lowtide.train.packing import text_documents
from lowtide.train.streams import IGNORED
from lowtide.train.tokenizer import tokenize_with

from train.test_chat import MARKED, TWO_TURNS, framed

pytest.importorskip("trl")
DATA: dict[str, list[dict[str, Any]]] = {
    "completions": [
        {"prompt": "2 + 2 = ", "completion": "4"},
        {"prompt": "2 + 2 =", "completion": " 4<|endoftext|>"},
        {"prompt": "", "completion": "é🌊"},
    ],
    "conversations": [TWO_TURNS],
    "texts": [{"text": "the tide came in"}, {"text": "and went out<|endoftext|>"}],
}


def of_trl(tokenizer: Any, data: list[dict[str, Any]], folder: Path) -> list[tuple[list[int], list[int]]]:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    marked = "messages" in data[0]
    settings = SFTConfig(
        str(folder), report_to=[], use_cpu=True, bf16=False, max_length=999, assistant_only_loss=marked
    )
    trainer = SFTTrainer(
        LlamaForCausalLM(LlamaConfig(vocab_size=400, **sizes)),
        settings,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
    )
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # TRL's own settings
@pytest.mark.parametrize("before", ["", "<s>"])
@pytest.mark.parametrize("kind", DATA)
def test_the_same_tokens_are_there_and_the_same_are_learned(kind: str, before: str, tmp_path: Path) -> None:
    tokenizer = framed(before, template=MARKED)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    if kind == "texts":
        (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{one["text"]}"}}\n' for one in DATA[kind]) * 400)
        corpus = open_corpus([str(tmp_path / "a.jsonl")], text_field="text", streams=1, seq_len=64)
        read = text_documents(corpus, tokenize_with(tokenizer), eos=tokenizer.eos_token_id)
        first = [document for _, document in zip(DATA[kind], read(0), strict=False)]
        ours = [(list(document.ids), list(document.ids)) for document in first]
    else:
        chat = ChatFormat(tokenizer, seq_len=999, too_long="drop")
        made = [chat.document(read_conversation(line, "here")) for line in DATA[kind]]
        ours = [(list(document.ids), list(document.labels or ())) for document in made]
    theirs = of_trl(tokenizer, DATA[kind], tmp_path)
    assert len(ours) == len(theirs)
    for (ids, labels), (expected, learned) in zip(ours, theirs, strict=True):
        assert ids == expected
        assert labels[1:] == learned[1:], "the first token has nothing to be predicted from"
    assert any(label != IGNORED for _, labels in ours for label in labels)
