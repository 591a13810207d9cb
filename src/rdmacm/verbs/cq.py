"""stub cq"""
from __future__ import annotations


class CompChannel:
    def __init__(self, context) -> None:
        self.backend = context.backend.create_channel()
    def fileno(self): return self.backend.fileno()
    def get_cq_event(self, timeout=None): return self.backend.get(timeout)
    def close(self): self.backend.close()
class CQ:
    def __init__(self, context, cqe, channel=None, cq_context=None) -> None:
        self.backend = context.backend.create_cq(cqe, channel.backend if channel else None, self)
        self.cqe = cqe; self.channel = channel; self.cq_context = cq_context
        self.poll_ = self.backend.poll
    def poll(self, num_entries=1): return self.backend.poll(num_entries)
    def wait(self, timeout=None): return self.backend.wait(timeout)
    def req_notify(self, solicited_only=False): self.backend.req_notify(solicited_only)
    def ack_events(self, n): ...
    def close(self): self.backend.destroy()
