"""What is said of the provider ``kernel``, and of its types of queue pairs, is what it does on this machine's device.

python3 -m interop.kernel_capabilities ADDRESS PEER
"""

from __future__ import annotations

import sys

from rdmacm import CmId, open_device
from rdmacm.capabilities import KERNEL, Feature
from rdmacm.provider import get_provider
from rdmacm.verbs import QPState, QPType, TransportType
from support.capabilities import CALLS, Place, check
from support.ends import states_of

INIT, RTS, ERR = QPState.INIT, QPState.RTS, QPState.ERR
CONNECTION = {"attached": INIT, "accepted": RTS, "disconnected": ERR, "ended": RTS}
DATAGRAMS = {"attached": RTS, "accepted": RTS, "disconnected": RTS}


def main(address: str, peer: str) -> None:
    provider = get_provider("kernel")
    assert provider.capabilities is KERNEL
    with CmId(provider=provider) as cmid:
        cmid.bind_addr((address, 0))
        name = cmid.verbs.name
    with open_device(name, provider) as context:
        assert context.backend.capabilities is KERNEL
        is_iwarp = context.backend.transport_type is TransportType.IWARP
    # 127.0.0.1 has no call that refuses it: interop.kernel_choice has what is chosen for it.
    for feature in [each for each in CALLS if each is not Feature.LOOPBACK_ADDRESSES]:
        print(feature.name)
        with open_device(name, provider) as context:
            check(Place(context, provider, (address, 0), (peer, 7471)), feature, KERNEL)
    if not is_iwarp:
        for qp_type, expected in ((QPType.RC, CONNECTION), (QPType.UC, CONNECTION), (QPType.UD, DATAGRAMS)):
            found = states_of("kernel", address, qp_type)
            assert found == expected, (qp_type, found)
    print("as expected")


if __name__ == "__main__":
    main(*sys.argv[1:])
