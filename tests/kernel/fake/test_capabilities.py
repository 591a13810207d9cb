"""What is said of the kernel's devices is what a device does that has, or has not, what is tried."""

from __future__ import annotations

import errno

import pytest

from kernel.fake.fake_library import FakeLibrary
from rdmacm.capabilities import KERNEL, Feature
from rdmacm.verbs import AccessFlag, DeviceCapFlag, SendOpsFlag
from support.capabilities import CALLS, OF_IDS, Place, check

EVERYTHING = DeviceCapFlag.FLUSH_GLOBAL | DeviceCapFlag.ATOMIC_WRITE


@pytest.mark.parametrize("feature", [each for each in CALLS if each not in OF_IDS], ids=lambda each: each.name)
@pytest.mark.parametrize("flags", [0, EVERYTHING], ids=["plain", "everything"])
def test_devices_of_the_kernel(fake: FakeLibrary, feature: Feature, flags: int) -> None:
    if flags:
        fake.controls.send_ops = int(sum(SendOpsFlag))
    else:
        fake.controls.access_errno = errno.EOPNOTSUPP
        fake.controls.refused_access = int(AccessFlag.ON_DEMAND | AccessFlag.HUGETLB | AccessFlag.ZERO_BASED)
    with fake.add_device(cap_flags_ex=int(flags)) as context:
        assert context.backend.capabilities is KERNEL
        check(Place(context), feature, KERNEL)
