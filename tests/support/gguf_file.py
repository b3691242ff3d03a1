"""A tiny Llama as a GGUF file: the same weights and tokenizer as its Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, path: Path, *, leave_out: str = "") -> Path:
    """The Llama in `folder` as unquantised GGUF, less the tensor named `leave_out`."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == leave_out:
            continue
        if "q_proj" in name:
            tensor = _interleave(tensor, config["num_attention_heads"])
        elif "k_proj" in name:
            tensor = _interleave(tensor, config["num_key_value_heads"])
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def _interleave(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """GGUF rotates neighbouring pairs of a head, transformers its two halves."""
    halves = weights.reshape(num_heads, 2, -1, weights.shape[1])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict, config: dict) -> None:
    vocab = tokenizer["model"]["vocab"] | {
        token["content"]: token["id"] for token in tokenizer["added_tokens"]
    }
    tokens = [f"<unused {n}>" for n in range(config["vocab_size"])]
    for token, token_id in vocab.items():
        tokens[token_id] = token
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if n in special else gguf.TokenType.NORMAL for n in range(len(tokens))]
    )
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
