"""A process group in which several messages may go as one; no message leaves this process."""

from __future__ import annotations


class Work:
    """A message under way."""

    def wait(self):
        return "there"


class Group:
    """Counts what really goes through it."""

    def __init__(self):
        self.sent = 0
        self.together = False

    def send(self, _tensors, _peer, _tag):
        self.sent += 1
        return None if self.together else Work()

    recv = send

    def _start_coalescing(self, _device):
        self.together = True

    def _end_coalescing(self, _device):
        self.together = False
        return Work()
