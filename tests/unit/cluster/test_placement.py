from __future__ import annotations

import pytest

from tandem.cluster.placement import actor_name, local_ray_options, worker_options, workers_of
from tandem.config.settings import Settings
from tandem.directory.base import Role

SETTINGS = Settings(cluster={"num_prefill": 2, "num_decode": 3})


def test_workers_have_stable_names_prefill_first() -> None:
    assert [worker_id for worker_id, _ in workers_of(SETTINGS)] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
        "decode-2",
    ]
    assert {role for worker_id, role in workers_of(SETTINGS) if worker_id.startswith("decode")} == {
        Role.DECODE
    }


def test_a_worker_takes_its_pool_and_is_restarted_for_ever() -> None:
    (worker_id, role), *_ = workers_of(SETTINGS)
    options = worker_options(worker_id, role, SETTINGS)
    assert options["name"] == actor_name(worker_id) == "tandem-prefill-0"
    assert options["resources"] == {"prefill": 1}
    assert options["lifetime"] == "detached"
    assert options["max_restarts"] == -1


def test_the_thread_count_is_the_settings_or_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    (worker_id, role), *_ = workers_of(SETTINGS)

    def threads(settings: Settings) -> str:
        return str(worker_options(worker_id, role, settings)["runtime_env"]["env_vars"]["OMP_NUM_THREADS"])

    assert threads(SETTINGS) == "6"
    assert threads(Settings(worker={"num_threads": 2})) == "2"


def test_a_ray_of_our_own_has_room_for_exactly_the_workers() -> None:
    assert local_ray_options(SETTINGS)["resources"] == {"prefill": 2, "decode": 3}
    assert local_ray_options(SETTINGS)["include_dashboard"] is False
