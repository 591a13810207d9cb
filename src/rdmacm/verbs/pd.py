"""stub pd"""
from __future__ import annotations

import errno

from rdmacm.errors import cm_error
from rdmacm.verbs.device import Context
from rdmacm.verbs.wr import SGE, Buffer


class PD:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.backend = context.backend
    def close(self) -> None: ...

class MR:
    def __init__(self, pd: PD, buffer: Buffer, access: int) -> None:
        self.pd = pd
        self.buf = memoryview(buffer).cast("B")
        self.backend = pd.backend.reg_mr(pd, self.buf, access)
        self.lkey, self.rkey, self.addr, self.length = self.backend.lkey, self.backend.rkey, self.backend.addr, self.backend.length
    def sge(self, offset: int = 0, length: int | None = None) -> SGE:
        if length is None:
            length = self.length - offset
        if offset < 0 or length < 0 or offset + length > self.length:
            raise cm_error(errno.EINVAL, "outside the region", "sge")
        return SGE(self.addr + offset, length, self.lkey)
    def close(self) -> None:
        self.backend.dereg()
        self.buf.release()
    def __enter__(self): return self
    def __exit__(self, *a): self.close()
