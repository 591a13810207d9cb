"""The end of an object that the kernel refuses: it is tried again, and nothing is forgotten."""

from __future__ import annotations

import gc

import pytest

from kernel.fake.fake_library import FakeLibrary
from rdmacm.kernel import verbs
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.verbs import CQ, CompChannel, Context
from support.clock import eventually

FOR_EVER = 1000
STAYS = "the kernel does not destroy a CQ, which stays until the device is closed: EBUSY"


def there(fake: FakeLibrary) -> tuple[int, int]:
    """The completion queues and the channels that are there."""
    return fake.controls.cqs, fake.controls.channels


def queue_of(context: Context) -> CQ:
    """A completion queue with a channel of its own."""
    return CQ(context, 4, CompChannel(context))


def close(queue: CQ) -> None:
    channel = queue.channel
    assert channel is not None
    queue.close()
    channel.close()


@pytest.mark.parametrize("refusals", [1, 3])
def test_completion_queue_that_is_busy_is_destroyed_later(fake: FakeLibrary, refusals: int) -> None:
    with fake.add_device() as context:
        used = queue_of(context)
        fake.controls.busy_cqs = refusals
        close(queue_of(context))
        assert there(fake) == (2, 2)
        others = [queue_of(context) for _ in range(3)]  # one may have the identity of the closed one
        eventually(lambda: used.poll() or there(fake) == (4, 4), "the queue or its channel is still there")
        assert fake.controls.cq_ends == refusals + 1
        for queue in (used, *others):
            close(queue)
        assert there(fake) == (0, 0)


def test_completion_queue_that_stays_busy_is_destroyed_with_its_context(
    fake: FakeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    def use() -> None:
        with fake.add_device() as context:
            used = queue_of(context)
            fake.controls.busy_cqs = FOR_EVER
            close(queue_of(context))
            eventually(lambda: used.poll() or caplog.messages, "there is no warning")
            assert f"mlx5_0: {STAYS}" in caplog.messages
            fake.controls.busy_cqs = 0
            close(used)
            assert there(fake) == (1, 1)

    use()
    forget_devices()
    assert (fake.controls.contexts, there(fake)) == (0, (0, 0))


def test_library_of_siw_is_not_asked_again(
    fake: FakeLibrary, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has unmapped the memory of the queue, and would unmap it again."""

    def use() -> None:
        with fake.add_device("siw0") as context:
            used = queue_of(context)
            fake.controls.busy_cqs = 1
            close(queue_of(context))
            assert f"siw0: {STAYS}" in caplog.messages
            used.poll()
            close(used)

    monkeypatch.setattr(Sysfs, "driver", lambda *_: "siw")
    use()
    forget_devices()
    assert (fake.controls.contexts, there(fake)) == (0, (1, 1))
    assert fake.controls.cq_ends == 2


def forget_devices() -> None:
    """Have nothing refer to the devices, whose contexts are closed then."""
    verbs._devices.clear()
    gc.collect()
