"""stub qp"""
from __future__ import annotations

from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.enums import QPAttrMask, QPState


class SRQ:
    def __init__(self, pd, init): self.backend = pd.backend.create_srq(pd, init.attr)
    def post_recv(self, wr): self.backend.post_recv(wr if isinstance(wr, list) else [wr])
    def close(self): self.backend.destroy()
class AH:
    def __init__(self, pd, attr): self.pd, self.attr = pd, attr
class QP:
    def __init__(self, pd, init):
        self.pd = pd; self.init = init; self.cap = init.cap
        self.backend = pd.backend.create_qp(pd, init, init.scq.backend, init.rcq.backend, init.srq.backend if init.srq else None)
        self.qp_num = self.backend.qp_num
    @property
    def state(self): return self.backend.state
    qp_state = state
    def modify(self, attr, mask): self.backend.modify(attr, mask)
    def to_error(self): self.backend.modify(QPAttr(qp_state=QPState.ERR), QPAttrMask.STATE)
    def post_send(self, wr): self.backend.post_send(wr if isinstance(wr, list) else [wr])
    def post_recv(self, wr): self.backend.post_recv(wr if isinstance(wr, list) else [wr])
    def close(self): self.backend.destroy()
