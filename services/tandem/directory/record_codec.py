"""A worker's record as JSON, for the directory only. Never pickle: the store is a socket."""

from __future__ import annotations

import base64
import json

from tandem.directory.base import Role, WorkerLoad, WorkerRecord, WorkerState
from tandem.errors import InternalError
from tandem.ids import Epoch, WorkerId
from tandem.kv.ticket import PeerAddress


def encode_record(record: WorkerRecord) -> bytes:
    """UTF-8 JSON."""
    address, load = record.address, record.load
    return json.dumps(
        {
            "worker_id": address.worker_id,
            "epoch": address.epoch,
            "control": address.control,
            "transport": base64.b64encode(address.transport).decode(),
            "role": record.role.value,
            "state": record.state.value,
            "model_id": record.model_id,
            "layout_fingerprint": record.layout_fingerprint,
            "block_size_tokens": record.block_size_tokens,
            "num_blocks": record.num_blocks,
            "max_context_tokens": record.max_context_tokens,
            "load": {
                "num_free_blocks": load.num_free_blocks,
                "num_running": load.num_running,
                "num_waiting": load.num_waiting,
                "queued_prefill_tokens": load.queued_prefill_tokens,
            },
            "capabilities": dict(record.capabilities),
        },
        separators=(",", ":"),
    ).encode()


def decode_record(data: bytes) -> WorkerRecord:
    """The inverse. Raises `InternalError` on anything else, e.g. a record of another version."""
    try:
        raw = json.loads(data)
        return WorkerRecord(
            address=PeerAddress(
                worker_id=WorkerId(str(raw["worker_id"])),
                epoch=Epoch(int(raw["epoch"])),
                control=str(raw["control"]),
                transport=base64.b64decode(raw["transport"], validate=True),
            ),
            role=Role(raw["role"]),
            state=WorkerState(raw["state"]),
            model_id=str(raw["model_id"]),
            layout_fingerprint=str(raw["layout_fingerprint"]),
            block_size_tokens=int(raw["block_size_tokens"]),
            num_blocks=int(raw["num_blocks"]),
            max_context_tokens=int(raw["max_context_tokens"]),
            load=WorkerLoad(**{name: int(value) for name, value in raw["load"].items()}),
            capabilities={str(name): str(value) for name, value in raw["capabilities"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InternalError(
            f"a worker record in the directory can't be read ({error!r}); "
            "do all processes run the same version of Tandem?"
        ) from error
