from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tandem.config.choices import LogFormat, ModelDtype, TransportKind, WeightFormat
from tandem.config.load import load_settings, variable_name
from tandem.config.settings import Settings
from tandem.errors import ConfigError

SECRET = "hunter2-4711"


@pytest.fixture(autouse=True)
def _no_outer_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("TANDEM_"):
            monkeypatch.delenv(name)


def problem(config_file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(config_file)
    return str(caught.value)


def test_the_defaults_run_on_a_laptop_and_bind_to_loopback_only() -> None:
    settings = load_settings()
    assert settings == Settings()
    assert settings.model.name == "smollm2-135m"
    assert settings.engine.block_size_tokens == 16
    assert {settings.gateway.host, settings.worker.host, settings.telemetry.metrics_host} == {"127.0.0.1"}
    assert settings.gateway.reflection is False


def test_options_beat_variables_beat_the_file_field_by_field(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text("[engine]\nnum_blocks = 1\nmax_waiting = 2\nmax_num_sequences = 3\n")
    monkeypatch.setenv("TANDEM_ENGINE__NUM_BLOCKS", "10")
    monkeypatch.setenv("TANDEM_ENGINE__MAX_WAITING", "20")
    engine = load_settings(file, {"engine": {"num_blocks": 100, "max_waiting": None}}).engine
    assert (engine.num_blocks, engine.max_waiting, engine.max_num_sequences) == (100, 20, 3)


def test_choices_are_enums(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("model:\n  dtype: bfloat16\n  weights: int8\ntelemetry: {log_format: json}\n")
    monkeypatch.setenv("TANDEM_TRANSFER__TRANSPORT", "inproc")
    settings = load_settings(file)
    assert settings.model.dtype is ModelDtype.BFLOAT16
    assert settings.model.weights is WeightFormat.INT8
    assert settings.telemetry.log_format is LogFormat.JSON
    assert settings.transfer.transport is TransportKind.INPROC


def test_the_tree_is_frozen_and_travels_to_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_GATEWAY__TENANT_SECRET", SECRET)
    settings = load_settings()
    with pytest.raises(ValidationError):
        settings.engine.num_blocks = 3
    assert type(settings) is Settings
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TANDEM_MODEL__DTYPE", "f64", ["model.dtype", "TANDEM_MODEL__DTYPE", "'float32' or 'bfloat16'"]),
        ("TANDEM_GATEWAY__PORT", "70000", ["gateway.port", "TANDEM_GATEWAY__PORT", "65535", "70000"]),
        ("TANDEM_ENGINE__NUM_BLOCKS", "0", ["engine.num_blocks", "greater than or equal to 1", "'0'"]),
        ("TANDEM_TRANSFER__LEASE_S", "nan", ["transfer.lease_s", "finite", "nan"]),
        ("TANDEM_ENGINE__NUM_BLOKS", "5", ["engine.num_bloks", "did you mean 'num_blocks'?", "max_waiting"]),
        ("TANDEM_ENGNE__NUM_BLOCKS", "5", ["TANDEM_ENGNE__NUM_BLOCKS", "did you mean 'engine'?"]),
        ("TANDEM_ENGINE", "{", ["engine", "one by one"]),
        ("TANDEM_GATEWAY", "5", ["gateway", "TANDEM_GATEWAY"]),
        ("TANDEM_DIRECTORY__NAMESPACE", "a b", ["directory.namespace", "'a b'"]),
        ("TANDEM_DIRECTORY__TTL_S", "1.5", ["directory", "at least twice heartbeat_s"]),
        ("TANDEM_ENGINE__MAX_BATCH_TOKENS", "8", ["max_batch_tokens (8)", "max_num_sequences (64)"]),
    ],
)  # fmt: skip
def test_an_error_names_the_setting_its_variable_and_what_it_may_be(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: list[str]
) -> None:
    monkeypatch.setenv(name, value)
    message = problem()
    for part in expected:
        assert part in message


def test_all_wrong_settings_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_GATEWAY__PORT", "-1")
    monkeypatch.setenv("TANDEM_MODEL__WEIGHTS", "int2")
    lines = problem().splitlines()
    assert len(lines) == 2
    assert {line.split(" ")[0] for line in lines} == {"gateway.port", "model.weights"}


def test_both_sizes_of_the_pool_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text("engine = {num_blocks = 5, memory_bytes = 5}\n")
    assert "num_blocks or memory_bytes, not both" in problem(file)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TANDEM_DIRECTORY__REDIS_URL", f"http://:{SECRET}@redis"),
        ("TANDEM_DIRECTORY", f'{{"redis_url": "nope:{SECRET}", "ttl_s": 1}}'),
        ("TANDEM_GATEWAY", f'{{"tenant_secret": ["{SECRET}"]}}'),
        ("TANDEM_GATEWAY", f'{{"tenant_secret": "{SECRET}"'),
    ],
)
def test_p31_a_secret_shows_in_no_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_p31_a_secret_shows_in_no_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_GATEWAY__TENANT_SECRET", SECRET)
    monkeypatch.setenv("TANDEM_DIRECTORY__REDIS_URL", f"redis://:{SECRET}@redis:6379/0")
    settings = load_settings()
    assert SECRET not in repr(settings)
    assert settings.gateway.tenant_secret is not None
    assert settings.gateway.tenant_secret.get_secret_value() == SECRET


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tandem.toml", "[engine\n", "not valid TOML"),
        ("tandem.yaml", f"gateway:\n  tenant_secret: [{SECRET}\n", "not valid YAML: line"),
        ("tandem.yaml", "- a\n", "must hold sections: model, engine"),
        ("tandem.json", "{}", "must end in .toml, .yaml or .yml"),
        ("tandem.toml", "[enigne]\n", "did you mean 'engine'?"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, text: str, expected: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    message = problem(file)
    assert expected in message
    assert SECRET not in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.toml: can't be read: No such file" in problem(tmp_path / "nowhere.toml")


def test_a_folder_means_the_same_in_every_process() -> None:
    settings = load_settings(None, {"telemetry": {"trace_dir": "traces"}})
    assert settings.telemetry.trace_dir == Path.cwd() / "traces"


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("# nothing\n")
    assert load_settings(file) == Settings()


def test_variables_without_a_section_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", "/somewhere")
    assert load_settings() == Settings()
    assert variable_name("engine.num_blocks") == "TANDEM_ENGINE__NUM_BLOCKS"


@pytest.mark.parametrize(
    ("options", "block_bytes", "num_blocks"),
    [
        ({"num_blocks": 7}, 1000, 7),
        ({"memory_bytes": 2999}, 1000, 2),
        ({"memory_bytes": 999}, 1000, 0),
        ({}, 1 << 20, 1024),
    ],
)
def test_the_pools_size(options: dict[str, int], block_bytes: int, num_blocks: int) -> None:
    assert load_settings(None, {"engine": options}).engine.num_blocks_for(block_bytes) == num_blocks


@pytest.mark.parametrize(
    ("ref", "name"),
    [("/models/Qwen3-0.6B", "Qwen3-0.6B"), ("a/b.gguf", "b"), ("smollm2-135m", "smollm2-135m")],
)
def test_a_model_is_named_after_its_source(ref: str, name: str) -> None:
    assert load_settings(None, {"model": {"ref": ref}}).model.name == name
    assert load_settings(None, {"model": {"ref": ref, "served_name": "x"}}).model.name == "x"


def test_reading_settings_loads_no_torch() -> None:
    code = "import sys, tandem.config.load, tandem.config.memory; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
