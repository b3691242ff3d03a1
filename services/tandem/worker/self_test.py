"""What a worker must manage before it may take traffic (P23). It warms both planes on the way."""

from __future__ import annotations

import asyncio

from tandem.clock import Clock, Deadline
from tandem.engine.engine import Engine
from tandem.errors import InternalError, TandemError, TransferFailed
from tandem.generation import SequenceSpec
from tandem.ids import AttemptId, IdSource
from tandem.request import FinishReason, SamplingParams
from tandem.transport.base import Transport

_NUM_TOKENS = 2
_PATTERN = bytes(range(256)) * 1024
_TIMEOUT_S = 10.0


def check_engine(engine: Engine) -> None:
    """Prefill and decode a few tokens with the engine's loop not yet running. Blocks.

    Raises `InternalError` when the model fails or its logits are not finite.
    """
    attempt_id = AttemptId("self-test")
    engine.submit(
        SequenceSpec(
            attempt_id,
            token_ids=(0,),
            num_prompt_tokens=1,
            sampling=SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True),
            seed=0,
            chain_root=b"self-test",
        )
    )
    num_tokens = 0
    while not engine.idle:
        for output in engine.step().outputs:
            if output.finish is FinishReason.ERROR:
                raise InternalError(f"the model failed its self-test: {output.error}")
            num_tokens += len(output.tokens)
    if num_tokens != _NUM_TOKENS:
        raise InternalError(f"the model failed its self-test: {num_tokens} of {_NUM_TOKENS} tokens came")


async def check_transport(transport: Transport, clock: Clock, ids: IdSource) -> None:
    """Send a pattern to ourselves the way blocks go. Raises `TransferFailed`."""
    tag = int(ids.hex128()[:16], 16)
    landed = bytearray(len(_PATTERN))
    receive = transport.post_receive(tag, memoryview(landed))
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            endpoint = await transport.connect(transport.address, Deadline.after(clock, _TIMEOUT_S))
            try:
                await endpoint.send(tag, memoryview(bytearray(_PATTERN)))
                await receive.wait()
            finally:
                await endpoint.aclose()
    except (TandemError, TimeoutError) as error:
        raise TransferFailed(
            f"the {transport.name} transport can't reach itself: {str(error) or 'no answer'}; "
            "`tandem doctor` tells more"
        ) from error
    finally:
        receive.cancel()
        await receive.wait_settled()
    if landed != _PATTERN:
        raise TransferFailed(
            f"the {transport.name} transport delivers wrong bytes; `tandem doctor` tells more"
        )
