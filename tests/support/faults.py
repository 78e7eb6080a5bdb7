"""An error at any one of the calls that some code makes: what stands around it must not notice."""

from __future__ import annotations

import sys


class Fault(Exception):
    """What no code of ours expects."""


class Throwing:
    """Counts the calls that lines of a folder make on this thread, and fails at one of them."""

    def __init__(self, folder, at, is_jobs_own):
        self.folder, self.at, self.is_jobs_own = str(folder), at, is_jobs_own
        self.count = 0
        self.last = {}
        """The last call of each line and function."""

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def __call__(self, frame, event, called):
        if event == "c_call":
            caller, name = frame, getattr(called, "__name__", "")
        elif event == "call" and frame.f_back is not None and not self.is_jobs_own(frame.f_code):
            caller, name = frame.f_back, frame.f_code.co_name
        else:
            return
        if caller.f_code.co_filename.startswith(self.folder):
            self.count += 1
            self.last[caller.f_code.co_filename, caller.f_lineno, name] = self.count
            if self.count == self.at:
                raise Fault(f"{caller.f_code.co_filename}:{caller.f_lineno} {name}")
