"""The device in host memory can delay its work. Then code that forgets to wait for it fails."""

import pytest
import torch

from tests.host_device import host_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not host_device.LOADED, reason="needs the device made of host memory"),
]


def test_nothing_has_happened_before_somebody_waits():
    with host_device.late_work():
        ones = torch.zeros(3, device="cuda").add_(1)
        seen = ones.to("cpu", non_blocking=True)
        assert not (seen == 1).any()
        assert ones.sum().item() == 3
        assert (seen == 1).all()
        assert ones.cpu().tolist() == [1, 1, 1]


def test_a_stream_that_does_not_wait_for_another_reads_what_was_there():
    with host_device.late_work():
        side, number = torch.cuda.Stream(), torch.zeros((), device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            number.fill_(5)
        assert (number + 1).item() == 1
        torch.cuda.current_stream().wait_stream(side)
        assert (number + 1).item() == 6


def test_memory_goes_to_others_unless_the_allocator_knows_who_reads_it():
    for is_told in (False, True):
        with host_device.late_work():
            side, source = torch.cuda.Stream(), torch.ones(4, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                copy = source.clone()
            if is_told:
                source.record_stream(torch.Stream(stream_id=side.stream_id, device_index=0, device_type=1))
            del source
            torch.cuda.current_stream().synchronize()  # another tensor uses the memory now
            side.synchronize()
            assert (copy == 1).all().item() is is_told
