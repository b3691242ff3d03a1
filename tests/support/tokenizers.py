"""Tiny tokenizers of the two families that decoder-only models use, trained here, the same each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "the cat sat on the mat, and the dog sat on the cat",
    "naïve café señor ångström; 日本語のテキスト 你好世界",
    "emoji 😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 flags e\u0301 combining",
    "STOP stop </s> ### User: Observation:",
)
BOS, EOS, UNK = "<s>", "</s>", "<unk>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role ' + message['role']) }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def _special() -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in (UNK, BOS, EOS)]


@cache
def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's family (Llama 3, Qwen, SmolLM): every byte is a token, merges may split characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[UNK, BOS, EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer


@cache
def byte_fallback(*, strip: bool = True) -> tokenizers.Tokenizer:
    """SentencePiece's family (Llama 2, Mistral, Gemma): what the vocabulary lacks comes as byte tokens."""
    pieces = [UNK, BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz,:#SUOP日本"))
    merges = [("▁", "t"), ("▁", "c"), ("a", "t"), ("h", "e"), ("▁t", "he"), ("▁c", "at"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate([*pieces, *letters, *(a + b for a, b in merges)])}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token=UNK, byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])]
    )
    tokenizer.add_special_tokens(_special())
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """The byte-fallback vocabulary behind the older decoder of the same family."""
    tokenizer = tokenizers.Tokenizer.from_str(byte_fallback().to_str())
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


FAMILIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_unstripped": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
}


def save(tokenizer: tokenizers.Tokenizer, folder: Path, **config: object) -> Path:
    """A model's folder with this tokenizer, a chat template and `config` on top of the usual."""
    usual: dict[str, object] = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    usual |= {"chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(usual | config), encoding="utf-8")
    return folder
