"""Thousands of random verbs: every answer stays right, and in the end nothing is left."""

from __future__ import annotations

from random import Random

import pytest
from tests.support.engine_fakes import Rig, make_spec, true_answer, true_next

from tandem.engine.results import ExportProgress, Reservation, StepResult
from tandem.errors import Overloaded
from tandem.generation import SequenceSpec, TokenOutput
from tandem.ids import AttemptId
from tandem.request import FinishReason


class World(Rig):
    """One engine, and what the world outside of it knows of its sequences."""

    def __init__(self, seed: int) -> None:
        super().__init__(num_blocks=24, max_num_sequences=5, max_waiting=6, max_context_tokens=60)
        self.random = Random(seed)
        self.num_specs = 0
        self.specs: dict[AttemptId, SequenceSpec] = {}
        self.generating: dict[AttemptId, list[int]] = {}
        self.exporting: dict[AttemptId, ExportProgress | None] = {}
        self.asking: set[AttemptId] = set()
        self.reserved: dict[AttemptId, Reservation] = {}
        self.num_finished = 0
        self.num_exported = 0
        self.num_admitted = 0

    def draw_spec(self) -> SequenceSpec:
        """Prompts from a small family, so that prefixes are shared, diverge and get evicted."""
        self.num_specs += 1
        tokens = [self.random.randrange(2) * 7] * self.random.randrange(1, 14)
        tokens += [self.random.randrange(3) for _ in range(self.random.randrange(1, 30))]
        spec = make_spec(
            f"attempt-{self.num_specs}",
            tokens,
            max_tokens=self.random.choice((1, 2, 5, 15)),
            num_prompt_tokens=len(tokens),
            priority=self.random.choice((0, 0, 0, 3)),
            root=self.random.choice((b"one", b"other")),
            seed=self.random.randrange(3),
        )
        self.specs[spec.attempt_id] = spec
        return spec

    def act(self) -> None:
        verb = self.random.choice((self.put, self.put, self.admit, self.end, self.end, self.step, self.step))
        verb()

    def put(self) -> None:
        spec = self.draw_spec()
        verb, known = self.random.choice(
            (
                (self.engine.submit, lambda: self.generating.update({spec.attempt_id: []})),
                (self.engine.export, lambda: self.exporting.update({spec.attempt_id: None})),
                (self.engine.reserve, lambda: self.asking.add(spec.attempt_id)),
            )
        )
        try:
            verb(spec)
        except Overloaded:
            return
        known()

    def admit(self) -> None:
        if not self.reserved:
            return
        attempt_id = self.random.choice(list(self.reserved))
        grant, spec = self.reserved.pop(attempt_id), self.specs[attempt_id]
        held = [self.runner.read(grant.block_ids, p) for p in range(grant.num_cached_tokens)]
        assert held == list(spec.token_ids[: grant.num_cached_tokens])
        self.runner.fill(grant.block_ids, spec.token_ids, grant.num_cached_tokens)
        first = true_next(spec.token_ids, spec.seed)
        self.generating[attempt_id] = [first]
        self.engine.admit(attempt_id, TokenOutput(first))
        self.num_admitted += 1

    def end(self) -> None:
        """Abort or release anything, finished and unknown ones included, perhaps twice."""
        known = [*self.generating, *self.exporting, *self.asking, *self.reserved]
        attempt_id = self.random.choice([*known, AttemptId("nobody"), *list(self.specs)[-3:]])
        for verb in self.random.choice(
            ((self.engine.abort,), (self.engine.release,), (self.engine.abort,) * 2)
        ):
            verb(attempt_id)
        if attempt_id in self.reserved or attempt_id in self.exporting:
            self.engine.release(attempt_id)
            self.reserved.pop(attempt_id, None)
            self.exporting.pop(attempt_id, None)

    def step(self) -> None:
        if self.random.random() < 0.02:
            self.runner.fail_next = RuntimeError("out of memory")
        self.hear(self.engine.step())
        for progress in filter(None, self.exporting.values()):
            tokens = self.specs[progress.attempt_id].token_ids
            for position in range(progress.num_computed_tokens):
                assert self.runner.read(progress.block_ids, position) == tokens[position]

    def hear(self, result: StepResult) -> None:
        for output in result.outputs:
            spec, heard = self.specs[output.attempt_id], self.generating[output.attempt_id]
            heard += [token.token_id for token in output.tokens]
            assert heard == true_answer(spec.token_ids, len(heard), spec.seed)
            if output.finish is FinishReason.LENGTH:
                assert len(heard) == spec.sampling.max_tokens
                self.num_finished += 1
            if output.finish is not None:
                del self.generating[output.attempt_id]
        for progress in result.exports:
            assert progress.attempt_id in self.exporting
            if progress.error is not None:
                self.engine.release(progress.attempt_id)
                del self.exporting[progress.attempt_id]
                continue
            self.exporting[progress.attempt_id] = progress
            self.num_exported += progress.first_token is not None
        for reservation in result.reservations:
            self.asking.discard(reservation.attempt_id)
            self.reserved[reservation.attempt_id] = reservation
        for refusal in result.refusals:
            # Withdrawn in the step that would have granted it: then it was never told of a grant.
            self.asking.remove(refusal.attempt_id)

    def wind_up(self) -> None:
        """Abort and release all that is left."""
        for attempt_id in self.specs:
            self.engine.abort(attempt_id)
        self.hear(self.engine.step())
        for attempt_id in self.specs:
            self.engine.release(attempt_id)
        self.hear(self.engine.step())


@pytest.mark.parametrize("seed", range(12))
def test_p1_p2_p6_after_random_use_every_map_is_empty_and_every_block_free(seed: int):
    world = World(seed)
    for _ in range(1500):
        world.act()
    world.wind_up()
    assert min(world.num_finished, world.num_exported, world.num_admitted) > 10
    assert world.generating == {}
    assert world.asking == set()
    assert world.engine.num_sequences == 0
    load = world.engine.load()
    assert load.num_free_blocks == 24
    assert (load.num_running, load.num_waiting, load.queued_prefill_tokens) == (0, 0, 0)
    assert world.engine.step().outputs == ()
    assert world.engine.idle
