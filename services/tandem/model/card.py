"""What a model's folder says of itself, read without torch: gateway and worker must agree on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tandem.config.choices import WeightFormat
from tandem.errors import ModelLoadError
from tandem.kv.layout import KvDtype, KvLayout

_CHUNK_BYTES = 1 << 24
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checked Hugging Face folder of a decoder-only model.

    `revision` is a digest (32 hex digits) of the configuration and of every byte of the weights.
    """

    folder: Path
    revision: str
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]

    @classmethod
    def read(cls, folder: Path) -> ModelFiles:
        """Read and digest a folder; half a gigabyte takes about 0.2 s. Raises `ModelLoadError`."""
        folder = folder.absolute()
        config = _read_config(folder)
        text = config.get("text_config", config)  # models with a second modality nest it
        if not isinstance(text, dict):
            raise ModelLoadError(f"{folder.name}/config.json: text_config must be an object; get it again")
        num_heads = _number(folder, text, "num_attention_heads")
        hidden_size = _number(folder, text, "hidden_size")
        return cls(
            folder=folder,
            revision=_digest(folder, weight_files(folder)),
            architecture=str((config.get("architectures") or ["unknown"])[0]),
            num_layers=_number(folder, text, "num_hidden_layers"),
            num_kv_heads=_number(folder, text, "num_key_value_heads", num_heads),
            head_dim=_number(folder, text, "head_dim", hidden_size // num_heads),
            vocab_size=_number(folder, text, "vocab_size"),
            max_context_tokens=_number(folder, text, "max_position_embeddings"),
            eos_token_ids=_eos_token_ids(folder, config, text),
        )

    def layout(self, dtype: KvDtype, weights: WeightFormat, block_size_tokens: int) -> KvLayout:
        """The layout of this model's blocks. Int8 weights give other keys and values, so they count."""
        return KvLayout(
            model_revision=f"{self.revision}-{weights.value}",
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            block_size_tokens=block_size_tokens,
        )


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder, by name. Raises `ModelLoadError` if there are none, or not all."""
    index = folder / _INDEX
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelLoadError(f"{folder.name}: {_INDEX} has no weight_map of file names; get it again")
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelLoadError(
                f"{folder.name}: {_INDEX} names {', '.join(missing)}, which is not there; "
                "download the folder again"
            )
        found = tuple(folder / name for name in names)
    else:
        found = tuple(sorted(folder.glob("*.safetensors")))
    if not found:
        raise ModelLoadError(
            f"{folder.name}: no .safetensors file; save the model with `save_pretrained(..., "
            "safe_serialization=True)`, or give a .gguf file instead"
        )
    return found


def _read_config(folder: Path) -> Mapping[str, Any]:
    if not folder.is_dir():
        raise ModelLoadError(
            f"{folder} is not a folder; give a Hugging Face model folder, or run `tandem pull`"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{folder.name}: no config.json; a Hugging Face model folder has one")
    return _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{path.parent.name}/{path.name} can't be read: {error}; get it again"
        ) from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path.parent.name}/{path.name} must hold a JSON object; get it again")
    return content


def _number(folder: Path, config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(
            f"{folder.name}/config.json: {name} must be a positive number, not {value!r}; "
            "is it a decoder-only language model?"
        )
    return value


def _eos_token_ids(folder: Path, *configs: Mapping[str, Any]) -> frozenset[int]:
    """Of all files: a chat model's end of turn often stands in generation_config.json only."""
    path = folder / "generation_config.json"
    found: set[int] = set()
    for source in (*configs, _read_json(path) if path.is_file() else {}):
        value = source.get("eos_token_id")
        several = value if isinstance(value, list) else [value]
        found.update(token_id for token_id in several if isinstance(token_id, int))
    return frozenset(found)


def _digest(folder: Path, weights: tuple[Path, ...]) -> str:
    digest = xxhash.xxh3_128()
    try:
        for path in (folder / "config.json", *weights):
            digest.update(f"{path.name}:{path.stat().st_size}:".encode())
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
    except OSError as error:
        raise ModelLoadError(f"{folder.name}: {error.filename} can't be read: {error.strerror}") from error
    return digest.hexdigest()
