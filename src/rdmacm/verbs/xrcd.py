"""XRC domains: ibv_open_xrcd(3)."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from rdmacm.capabilities import Feature, absent
from rdmacm.errors import cm_error
from rdmacm.verbs import checks
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import DeviceCapFlag, XRCDInitAttrMask
from rdmacm.verbs.resource import Resource

_OFLAGS = os.O_CREAT | os.O_EXCL


@dataclass(slots=True)
class XRCDInitAttr:
    """``struct ibv_xrcd_init_attr``, ibv_open_xrcd(3).

    - ``comp_mask``: a :class:`XRCDInitAttrMask`. A field counts whether or not it is named.
    - ``oflags``: O_CREAT: make the domain if there is none for the file; with O_EXCL as well, only then.
    - ``fd``: a descriptor of the file that the domain stands for; -1 for a domain of its own.
    """

    comp_mask: int = 0
    oflags: int = os.O_CREAT
    fd: int = -1


def check_xrc(context: Context, step: str, feature: Feature = Feature.XRC) -> None:
    """EOPNOTSUPP for a feature on a device without XRC."""
    if not context.backend.attr.device_cap_flags & DeviceCapFlag.XRC:
        raise absent(feature, step, context.name, "the device")


class XRCD(Resource):
    """An XRC domain, ``struct ibv_xrcd``: XRC_RECV queue pairs use the shared receive queues of their domain.

    Objects with a descriptor of the same file are the same domain, within this process. EBUSY when it is closed: a
    queue pair or a shared receive queue is in it. EINVAL: unknown flags, no O_CREAT without a file, or O_EXCL and there
    is a domain for the file; EAGAIN: no O_CREAT, and there is none; EBADF: not a descriptor, or the context is closed;
    EOPNOTSUPP: the device has no XRC.
    """

    __slots__ = {
        "context": "The :class:`Context` of its device.",
        "backend": "The provider's object (:mod:`rdmacm.verbs.backend`).",
    }

    _warns = False

    def __init__(self, context: Context, init_attr: XRCDInitAttr | None = None) -> None:
        self._closed = True
        step = "open_xrcd"
        checks.check_context(context, step)
        attr = XRCDInitAttr() if init_attr is None else init_attr
        checks.check_kind("init_attr", attr, XRCDInitAttr, step)
        checks.flags(XRCDInitAttrMask, attr.comp_mask, "comp_mask", step)
        checks.check_number("oflags", attr.oflags, 0, _OFLAGS, step)
        checks.check_number("fd", attr.fd, -1, (1 << 31) - 1, step)
        if attr.oflags & ~_OFLAGS:
            raise cm_error(errno.EINVAL, f"unknown oflags {attr.oflags & ~_OFLAGS:#x}", step, hint="O_CREAT, O_EXCL")
        inode = None
        if attr.fd == -1:
            if attr.oflags != os.O_CREAT:
                raise cm_error(errno.EINVAL, "a domain without a file is always new", step, hint="oflags=os.O_CREAT")
        else:
            try:
                found = os.fstat(attr.fd)
            except OSError as error:
                text = f"fd is {attr.fd}: {error.strerror}"
                raise cm_error(error.errno or errno.EBADF, text, step, context.name) from error
            inode = found.st_dev, found.st_ino
        check_xrc(context, step)
        create, exclusive = bool(attr.oflags & os.O_CREAT), bool(attr.oflags & os.O_EXCL)
        self.context: Context = context
        self.backend: object = self._make(step, (), lambda: context.backend.open_xrcd(inode, create, exclusive))

    def __repr__(self) -> str:
        return f"<XRCD {self.context.name}{' closed' if self._closed else ''}>"
