"""A device whose queue pairs and memory cannot be reached: it has limits, which connecting needs, and refuses the rest.

See :class:`rdmacm.verbs.backend.DeviceBackend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from rdmacm.capabilities import Capabilities, Feature, absent
from rdmacm.errors import RdmaError
from rdmacm.verbs.attr import DeviceAttr
from rdmacm.verbs.attrex import DeviceAttrEx
from rdmacm.verbs.enums import TransportType


class BareDevice:
    """See the module. ``attr``: its limits; those of queues and regions count for nothing."""

    #: What to try for queue pairs; empty for what :class:`Feature` says.
    hint = ""
    num_comp_vectors = 1

    def __init__(self, name: str, transport_type: TransportType, attr: DeviceAttr, capabilities: Capabilities) -> None:
        self.name = name
        self.transport_type = transport_type
        self.attr = attr
        self.capabilities = capabilities
        self.default_pds: list[Any] = []
        self.default_xrcds: list[Any] = []

    @property
    def attr_ex(self) -> DeviceAttrEx:
        """See :class:`rdmacm.verbs.backend.DeviceBackend`."""
        return DeviceAttrEx.of(self.attr)

    def refusal(self) -> RdmaError:
        """The error of every call."""
        return absent(Feature.VERBS, "open_device", self.name, self.capabilities, hint=self.hint)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise self.refusal()

    def query_counters(self) -> dict[str, int]:
        """See :class:`rdmacm.verbs.backend.DeviceBackend`."""
        raise self.refusal()

    reg_mr: Callable[..., NoReturn] = _refuse
    reg_dmabuf_mr: Callable[..., NoReturn] = _refuse
    alloc_mw: Callable[..., NoReturn] = _refuse
    create_ah: Callable[..., NoReturn] = _refuse
    create_channel: Callable[..., NoReturn] = _refuse
    create_async_queue: Callable[..., NoReturn] = _refuse
    create_cq: Callable[..., NoReturn] = _refuse
    create_srq: Callable[..., NoReturn] = _refuse
    create_qp: Callable[..., NoReturn] = _refuse
    open_qp: Callable[..., NoReturn] = _refuse
    open_xrcd: Callable[..., NoReturn] = _refuse
    create_xrc_srq: Callable[..., NoReturn] = _refuse
