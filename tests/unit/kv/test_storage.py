import pytest
import torch

from tandem.ids import BlockId
from tandem.kv.layout import KvDtype, KvLayout
from tandem.kv.storage import KvStorage


@pytest.fixture(params=KvDtype, ids=lambda dtype: dtype.value)
def storage(request) -> KvStorage:
    return KvStorage(KvLayout("rev", 3, 2, 8, request.param, block_size_tokens=4), num_blocks=5)


def test_a_block_is_its_part_of_the_tensor(storage):
    storage.tensor[2].fill_(1.5)
    assert (
        bytes(storage.block(BlockId(2))) == storage.tensor[2].contiguous().view(torch.uint8).numpy().tobytes()
    )
    assert not any(storage.block(BlockId(1)))
    assert not any(storage.block(BlockId(3)))
    assert len(storage.block(BlockId(0))) == storage.layout.block_bytes


def test_bytes_written_to_a_block_are_in_the_tensor(storage):
    source = KvStorage(storage.layout, 5)
    source.tensor.copy_(torch.randn(source.tensor.shape).to(source.tensor.dtype))
    storage.block(BlockId(4))[:] = source.block(BlockId(1))
    assert torch.equal(storage.tensor[4], source.tensor[1])
    assert not storage.tensor[:4].any()


def test_a_checksum_sees_one_changed_bit(storage):
    before = storage.checksum(BlockId(3))
    assert before == storage.checksum(BlockId(0))
    storage.block(BlockId(3))[-1] ^= 1
    assert storage.checksum(BlockId(3)) != before
