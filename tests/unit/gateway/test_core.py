"""The gateway as its users see it, over a decode worker that follows a script."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.support.scripted_worker import FINGERPRINT, ScriptedPeers, ScriptedWorker, output, record_of
from tests.support.tokenizers import EOS, byte_level, save

from tandem.clock import Deadline
from tandem.config.choices import DisaggregationMode
from tandem.directory.base import Role
from tandem.directory.memory import MemoryDirectory
from tandem.errors import DeadlineExceeded, InvalidRequest, NoWorker, Overloaded, UnknownModel
from tandem.gateway.core import GatewayCore
from tandem.gateway.dispatch import Dispatcher
from tandem.gateway.links import WorkerLinks
from tandem.gateway.prompt import PromptReader, ServedModel
from tandem.generation import CallContext, Phase, PhaseTiming
from tandem.ids import GatewayId
from tandem.model.tokenizer import Tokenizer
from tandem.request import ChatMessage, FinishReason, Request, SamplingParams, Slo
from tandem.routing.admission import Admission
from tandem.routing.query import RouterPolicy
from tandem.routing.router import Router
from tandem.rpc.services import GenerateChunk, ModelCard
from tandem.system import SystemClock, SystemIds
from tandem.telemetry.tracing import Tracing

CONTEXT = CallContext()


class Bench:
    """A gateway and its one worker, which answers each sequence with the tokens of `answer`."""

    def __init__(self, folder, max_requests: int = 8) -> None:
        self.tokenizer = Tokenizer(folder)
        self.eos = self.tokenizer.token_id(EOS)
        self.answer: list[list[int]] = []
        self.finish: FinishReason | None = FinishReason.STOP
        self.specs: list = []
        self.worker = ScriptedWorker(record_of("decode-0", Role.DECODE), on_submit=self._speak)
        self.spans = InMemorySpanExporter()
        self.tracing = Tracing("gateway", "test", exporters=[self.spans])
        clock, ids = SystemClock(), SystemIds()
        self.clock = clock
        self.directory = MemoryDirectory(clock)
        self.links = WorkerLinks(GatewayId("g"), ScriptedPeers(self.worker))
        self.router = Router(RouterPolicy(mode=DisaggregationMode.NEVER), lambda n: 0)
        model = ServedModel(
            ModelCard("tiny", "rev", 64, self.tokenizer.vocab_size),
            self.tokenizer,
            FINGERPRINT,
            4,
            1000,
            frozenset({self.eos}),
        )
        dispatcher = Dispatcher(
            self.router,
            self.directory,
            self.links,
            layout_fingerprint=FINGERPRINT,
            block_bytes=1000,
            clock=clock,
            ids=ids,
        )
        self.core = GatewayCore(
            model,
            PromptReader(model, max_prompt_bytes=1000, tenant_secret=b"s"),
            dispatcher,
            self.directory,
            Admission(max_requests, clock),
            clock=clock,
            ids=ids,
            tracer=self.tracing.tracer,
        )

    def _speak(self, spec) -> None:
        self.specs.append(spec)
        for at, tokens in enumerate(self.answer):
            last = at == len(self.answer) - 1
            decode = PhaseTiming(Phase.DECODE, 1, 0.5, {"worker": "decode-0", "num_tokens": 3})
            self.worker.say(
                output(
                    spec,
                    *tokens,
                    finish=self.finish if last else None,
                    phases=(decode,) if last and self.finish else (),
                )
            )

    def say(self, *texts: str, eos: bool = False) -> None:
        self.answer = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        if eos:
            self.answer.append([self.eos])

    async def generate(self, request: Request) -> list[GenerateChunk]:
        return [chunk async for chunk in self.core.generate(request, CONTEXT)]

    def assert_idle(self) -> None:
        assert self.core.admission.num_open == 0
        assert self.router.book.num_open == 0
        assert self.links.num_listening == 0


@pytest.fixture
async def bench(tmp_path):
    bench = Bench(save(byte_level(), tmp_path / "model"))
    await bench.directory.membership.announce(bench.worker.record, 60.0)
    yield bench
    await bench.links.aclose()
    bench.assert_idle()
    bench.tracing.shutdown()


def ask(text: str = "the cat", **sampling) -> Request:
    return Request(prompt=text, sampling=SamplingParams(**sampling), request_id="mine")


async def test_text_tokens_usage_and_phases(bench):
    bench.say("the dog", " sat", eos=True)
    chunks = await bench.generate(ask())
    assert "".join(chunk.text for chunk in chunks) == "the dog sat"
    last = chunks[-1]
    assert last.finish is FinishReason.STOP
    assert last.request_id == "mine"
    num_prompt = len(bench.tokenizer.encode("the cat"))
    assert (last.usage.prompt_tokens, last.usage.cached_tokens) == (num_prompt, 0)
    assert last.usage.completion_tokens == sum(map(len, bench.answer))
    assert [timing.phase for timing in last.phases] == [Phase.TOKENISE, Phase.ROUTE, Phase.DECODE]
    assert all(chunk.usage is None and chunk.finish is None for chunk in chunks[:-1])


async def test_a_chat_goes_through_the_template(bench):
    bench.say("yes")
    await bench.generate(Request(messages=(ChatMessage("user", "the cat?"),)))
    prompt = bench.tokenizer.encode_chat([ChatMessage("user", "the cat?")])
    assert bench.specs[0].token_ids == tuple(prompt)


async def test_p25_a_stop_string_over_several_outputs_ends_the_text_and_the_sequence(bench):
    bench.finish = None
    bench.say("the dog ST", "O", "P and more")
    chunks = await bench.generate(ask(stop=("STOP",)))
    assert "".join(chunk.text for chunk in chunks) == "the dog "
    assert chunks[-1].finish is FinishReason.STOP
    assert bench.worker.cancelled == [bench.specs[0].attempt_id]
    kept = sum(len(chunk.tokens) for chunk in chunks)
    assert chunks[-1].usage.completion_tokens == kept < sum(map(len, bench.answer))


async def test_a_stop_string_that_never_completes_is_text(bench):
    bench.say("the dog ST", "O", eos=True)
    chunks = await bench.generate(ask(stop=("STOP",)))
    assert "".join(chunk.text for chunk in chunks) == "the dog STO"


@pytest.mark.parametrize("text", ["日本語のテキスト 你好世界", "👩‍👩‍👧‍👦 🇩🇪", "e\u0301 naïve"])
async def test_p24_text_in_parts_is_the_text_and_never_half_a_character(bench, text):
    tokens = bench.tokenizer.encode(text, add_special_tokens=False)
    bench.answer = [[token] for token in tokens]
    bench.finish = FinishReason.LENGTH
    chunks = await bench.generate(ask())
    assert "".join(chunk.text for chunk in chunks) == text
    assert all("\ufffd" not in chunk.text for chunk in chunks)


async def test_choices_have_their_own_seeds_and_one_usage(bench):
    bench.say("the cat", eos=True)
    chunks = await bench.generate(ask(n=3, seed=7))
    assert sorted(spec.seed for spec in bench.specs) == [7, 8, 9]
    for index in range(3):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in mine) == "the cat"
        assert mine[-1].finish is FinishReason.STOP
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens == 3 * sum(map(len, bench.answer))


async def test_p17_tenants_have_other_chains_and_a_public_prefix_has_none(bench):
    bench.say("yes")
    for request in (
        replace(ask(), tenant="a"),
        replace(ask(), tenant="b"),
        replace(ask(), tenant="a"),
        replace(ask(), tenant="a", public_prefix=True),
        replace(ask(), tenant="b", public_prefix=True),
    ):
        await bench.generate(request)
    a, b, again, public, public_b = (spec.chain_root for spec in bench.specs)
    assert a == again
    assert public == public_b
    assert len({a, b, public}) == 3


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(), "input"),
        (Request(prompt=""), "prompt"),
        (Request(prompt="a", messages=(ChatMessage("user", "b"),)), "input"),
        (Request(token_ids=(1, 10**6)), "token_ids"),
        (ask(max_tokens=0), "sampling.max_tokens"),
        (ask(temperature=-1.0), "sampling.temperature"),
        (ask(n=0), "sampling.n"),
        (ask("the cat " * 100), "prompt"),
        (ask("x" * 2000), "prompt"),
        (ask(max_tokens=63), "sampling.max_tokens"),
        (replace(ask(), slo=Slo(ttft_s=-1.0)), "slo.ttft_s"),
        (replace(ask(), priority=1000), "priority"),
    ],
)
async def test_p30_nonsense_names_its_field(bench, request_, field):
    with pytest.raises(InvalidRequest) as caught:
        await bench.generate(request_)
    assert caught.value.field == field
    assert bench.worker.calls == []


async def test_an_unknown_model_is_told_what_is_served(bench):
    with pytest.raises(UnknownModel, match="'tiny'"):
        await bench.generate(replace(ask(), model="gpt-5"))


async def test_no_decode_worker_says_so(bench):
    await bench.directory.membership.leave("decode-0", 1)
    with pytest.raises(NoWorker, match="decode"):
        await bench.generate(ask())


async def test_a_passed_deadline_costs_no_worker(bench):
    late = CallContext(Deadline(bench.clock.monotonic_s() - 1))
    with pytest.raises(DeadlineExceeded):
        async for _ in bench.core.generate(ask(), late):
            pass
    assert bench.worker.calls == []


async def test_too_many_requests_are_told_when_to_come_back(tmp_path):
    full = Bench(save(byte_level(), tmp_path / "model"), max_requests=1)
    full.finish = None
    full.say("the")
    await full.directory.membership.announce(full.worker.record, 60.0)
    async with aclosing(full.core.generate(ask(), CONTEXT)) as first:
        await anext(first)
        with pytest.raises(Overloaded) as caught:
            await full.generate(ask())
        assert caught.value.retry_after_s > 0
    full.assert_idle()
    await full.links.aclose()


async def test_a_client_that_leaves_cancels_its_sequence_and_its_span_says_so(bench):
    bench.finish = None
    bench.say("the cat")
    async with aclosing(bench.core.generate(ask(), CONTEXT)) as chunks:
        await anext(chunks)
    await asyncio.sleep(0)
    assert bench.worker.cancelled == [bench.specs[0].attempt_id]
    (span,) = [span for span in bench.spans.get_finished_spans() if span.name.startswith("text_completion")]
    assert span.attributes["tandem.outcome"] == "cancelled"


async def test_p27_one_trace_with_the_phases_under_the_request(bench):
    bench.say("yes", eos=True)
    chunks = await bench.generate(ask())
    spans = {span.name: span for span in bench.spans.get_finished_spans()}
    root = spans["text_completion tiny"]
    assert f"{root.context.trace_id:032x}" == chunks[-1].trace_id
    assert set(spans) == {"text_completion tiny", "tandem.tokenise", "tandem.route"}
    for name in ("tandem.tokenise", "tandem.route"):
        assert spans[name].parent.span_id == root.context.span_id
    assert root.attributes["gen_ai.usage.output_tokens"] == chunks[-1].usage.completion_tokens
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)


async def test_p31_a_canary_prompt_is_in_no_span(bench):
    bench.say("canary-answer", eos=True)
    await bench.generate(ask("canary-prompt"))
    shown = "".join(span.to_json() for span in bench.spans.get_finished_spans())
    assert "canary" not in shown


async def test_tokenising_is_what_generating_does_and_detokenising_its_inverse(bench):
    result = await bench.core.tokenize(ask("the cat sat"))
    bench.say("yes")
    await bench.generate(ask("the cat sat"))
    assert bench.specs[0].token_ids == result.token_ids
    assert await bench.core.detokenize("tiny", result.token_ids) == "the cat sat"
    with pytest.raises(InvalidRequest, match="token_ids"):
        await bench.core.detokenize("", [10**6])


async def test_models_and_workers_are_listed(bench):
    assert [card.model_id for card in await bench.core.list_models()] == ["tiny"]
    info = await bench.core.server_info()
    assert [worker.worker_id for worker in info.workers] == ["decode-0"]
