import json
import shutil
import struct
from pathlib import Path

import pytest
from tests.support.models import MAX_CONTEXT_TOKENS, VOCAB_SIZE, Tiny, tiny_model

from tandem.config.choices import WeightFormat
from tandem.errors import ModelLoadError
from tandem.kv.layout import KvDtype
from tandem.model.card import ModelFiles, weight_files

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny model that the test may spoil."""
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


def edit(folder: Path, name: str = "config.json", **changes: object) -> None:
    """Set keys of a JSON file; None removes one."""
    path = folder / name
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def shard(folder: Path) -> tuple[Path, Path]:
    """Name the weights as the second of two shards; the first holds nothing."""
    first, second = (folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    (folder / "model.safetensors").rename(second)
    header = b"{}      "
    first.write_bytes(struct.pack("<Q", len(header)) + header)
    index = {"weight_map": {"a": second.name, "b": first.name, "c": second.name}}
    (folder / INDEX).write_text(json.dumps(index))
    return first, second


@pytest.mark.parametrize("kind", Tiny, ids=lambda kind: kind.value)
def test_the_numbers_of_every_family(kind):
    files = ModelFiles.read(tiny_model(kind))
    assert (files.num_layers, files.num_kv_heads, files.head_dim) == (3, 2, 16)
    assert (files.vocab_size, files.max_context_tokens) == (VOCAB_SIZE, MAX_CONTEXT_TOKENS)
    assert files.eos_token_ids == {2}
    assert files.architecture.lower().startswith(kind.value)
    assert files.folder == tiny_model(kind)


def test_a_folder_given_relatively_is_known_absolutely(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert ModelFiles.read(Path("model")).folder == folder


def test_key_heads_and_head_dim_have_the_usual_defaults(folder):
    edit(folder, num_key_value_heads=None, head_dim=None)
    files = ModelFiles.read(folder)
    assert (files.num_kv_heads, files.head_dim) == (4, 64 // 4)


def test_the_numbers_of_a_model_nested_in_one_of_several_modalities(folder):
    plain = ModelFiles.read(folder)
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": config.pop("architectures"), "text_config": config, "hidden_size": 7}
    (folder / "config.json").write_text(json.dumps(outer))
    nested = ModelFiles.read(folder)
    assert (nested.num_layers, nested.num_kv_heads, nested.head_dim) == (3, 2, 16)
    assert nested.architecture == plain.architecture
    assert nested.revision != plain.revision


def test_the_revision_follows_the_bytes_not_the_place(folder, tmp_path):
    before = ModelFiles.read(folder).revision
    assert len(before) == 32
    assert int(before, 16) >= 0
    moved = folder.rename(tmp_path / "elsewhere")
    assert ModelFiles.read(moved).revision == before == ModelFiles.read(tiny_model()).revision


def test_the_revision_sees_one_changed_bit_of_the_weights(folder):
    before = ModelFiles.read(folder).revision
    flip_last_byte(folder / "model.safetensors")
    assert ModelFiles.read(folder).revision != before
    flip_last_byte(folder / "model.safetensors")
    assert ModelFiles.read(folder).revision == before


def test_the_revision_sees_the_configuration(folder):
    before = ModelFiles.read(folder).revision
    edit(folder, rope_theta=1e5)  # no number of ours, yet other keys
    assert ModelFiles.read(folder).revision != before


def test_the_revision_does_not_see_the_tokenizer(folder):
    before = ModelFiles.read(folder).revision
    (folder / "tokenizer.json").unlink()
    assert ModelFiles.read(folder).revision == before


@pytest.mark.parametrize("which", [0, 1])
def test_the_revision_sees_every_shard(folder, which):
    shards = shard(folder)
    before = ModelFiles.read(folder).revision
    flip_last_byte(shards[which])
    assert ModelFiles.read(folder).revision != before


def test_shards_are_named_once_each_and_no_other_file_counts(folder):
    shards = shard(folder)
    (folder / "adapter.safetensors").write_bytes(b"not named by the index")
    assert weight_files(folder) == shards


def test_every_end_of_sequence_of_both_files_counts(folder):
    edit(folder, eos_token_id=[2, 5])
    edit(folder, "generation_config.json", eos_token_id=[5, 7])
    assert ModelFiles.read(folder).eos_token_ids == {2, 5, 7}
    edit(folder, eos_token_id=0)
    edit(folder, "generation_config.json", eos_token_id=7)
    assert ModelFiles.read(folder).eos_token_ids == {0, 7}
    (folder / "generation_config.json").unlink()
    assert ModelFiles.read(folder).eos_token_ids == {0}
    edit(folder, eos_token_id=None)
    assert ModelFiles.read(folder).eos_token_ids == frozenset()


def fails(folder: Path, *parts: str) -> None:
    """Reading fails, and the message holds all of `parts`: what is wrong, and the cure."""
    with pytest.raises(ModelLoadError) as caught:
        ModelFiles.read(folder)
    for part in parts:
        assert part in str(caught.value)


def test_no_folder(tmp_path):
    fails(tmp_path / "nothing", "nothing is not a folder", "tandem pull")
    (tmp_path / "file").write_text("")
    fails(tmp_path / "file", "is not a folder")


def test_no_configuration(folder):
    (folder / "config.json").unlink()
    fails(folder, "no config.json", "a Hugging Face model folder has one")


@pytest.mark.parametrize("content", [b'{"hidden_size": 6', b"", b"\xff\xfe{}"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_a_damaged_file(folder, name, content):
    (folder / name).write_bytes(content)
    fails(folder, f"model/{name} can't be read", "get it again")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_a_file_that_holds_no_object(folder, name):
    (folder / name).write_text("[1]")
    fails(folder, f"model/{name} must hold a JSON object", "get it again")


def test_no_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    fails(folder, "no .safetensors file", "safe_serialization=True", ".gguf")


def test_an_index_that_names_no_weights(folder):
    (folder / INDEX).write_text("{}")
    fails(folder, "weight_map")


def test_a_missing_shard(folder):
    first, second = shard(folder)
    first.unlink()
    fails(folder, INDEX, first.name, "download the folder again")
    second.unlink()
    fails(folder, f"{first.name}, {second.name}")


@pytest.mark.parametrize(
    "name",
    [
        "num_attention_heads",
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [None, 0, -1, "many", 1.5])
def test_a_number_that_is_missing_or_none(folder, name, value):
    edit(folder, **{name: value})
    fails(folder, f"model/config.json: {name} must be a positive number, not {value!r}", "decoder-only")


def test_layouts_differ_by_all_that_changes_a_block():
    files = ModelFiles.read(tiny_model())
    base = files.layout(KvDtype.FLOAT32, WeightFormat.FULL, 16)
    assert base.block_shape == (3, 2, 16, 2, 16)
    assert base == files.layout(KvDtype.FLOAT32, WeightFormat.FULL, 16)
    others = [
        files.layout(KvDtype.BFLOAT16, WeightFormat.FULL, 16),
        files.layout(KvDtype.FLOAT32, WeightFormat.INT8, 16),
        files.layout(KvDtype.FLOAT32, WeightFormat.FULL, 32),
        ModelFiles.read(tiny_model(seed=1)).layout(KvDtype.FLOAT32, WeightFormat.FULL, 16),
    ]
    assert len({layout.fingerprint for layout in (base, *others)}) == 5


@pytest.mark.parametrize(
    "change",
    [
        {"text_config": "nonsense"},
        {"num_key_value_heads": "two"},
        {"num_key_value_heads": -1},
        {"head_dim": 0},
        {"head_dim": None, "hidden_size": 2},
    ],
    ids=str,
)
def test_nonsense_of_any_type_is_a_load_error(folder, change):
    edit(folder, **change)
    fails(folder, "config.json")


def test_an_index_that_is_no_map_is_a_load_error(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    fails(folder, "weight_map")


def test_an_end_of_sequence_that_is_text_is_ignored_and_the_outer_one_counts(folder):
    nested = json.loads((folder / "config.json").read_text()) | {"eos_token_id": "</s>"}
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7, "text_config": nested}))
    (folder / "generation_config.json").unlink()
    assert ModelFiles.read(folder).eos_token_ids == {7}
