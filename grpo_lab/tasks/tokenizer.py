"""A character-level tokenizer for the tiny models: one character, one token, nothing added."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD_TOKEN = "<pad>"  # noqa: S105 - a token of a vocabulary, not a secret
END_TOKEN = "<end>"  # noqa: S105
UNKNOWN_TOKEN = "<unk>"  # noqa: S105
CHARACTERS = "0123456789>=+-*/() "

# Contents are joined as they are, so a chat prompt means the same to the model as its plain text.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def make_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0, 1, 2 are pad, end and unknown, followed by ``characters`` in order."""
    vocabulary = {
        token: index for index, token in enumerate((PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN, *characters))
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
