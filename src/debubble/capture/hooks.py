"""Inside a job that was started to be captured: its own beat in → `debubble.step` out.

A step of a torch.distributed.pipelining schedule is the beat; in jobs without one, a step of the
first optimizer. torch is not imported before the job does so itself. Whatever goes wrong in here is
said on stderr, and the job goes on as if nothing had been asked.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from debubble.capture.session import begin, describe, say, step
from debubble.capture.settings import Settings, read_order
from debubble.errors import DebubbleError

if TYPE_CHECKING:
    from debubble.capture.recording import Session

SCHEDULES = "torch.distributed.pipelining.schedules"
OPTIMIZER = "torch.optim.optimizer"
_STEPPING = ("PipelineScheduleSingle", "PipelineScheduleMulti")


def install() -> None:
    """Wait for the modules that can give the beat, where a capture was ordered."""
    settings = read_order(Settings, os.environ)
    if settings is not None:
        CapturedBeat(settings).listen()


class Beat:
    """A job's own rhythm, from whichever of its parts gives one; what it is for, others say."""

    def __init__(self) -> None:
        self.giver: int | None = None
        """Whose steps are counted: a job may have several optimizers, or schedules."""
        self.scheduled = False
        self.undo = ExitStack()
        """Closed, the job is as it was before."""

    def begin(self, pipeline: Any) -> None:
        """Begin with the first step; `pipeline` is the schedule that runs it, or None."""
        raise NotImplementedError

    def step(self) -> None:
        """Take note that a step ended, and the next began."""
        raise NotImplementedError

    def end(self) -> None:
        """Stop what was begun; another part of the job gives the beat from here on."""
        raise NotImplementedError

    def give_up(self, error: Exception) -> None:
        """Say why this process is left alone from here on."""
        raise NotImplementedError

    def listen(self) -> None:
        """Wait for the modules that can give the beat: hooked now, or once they are imported."""
        hooks = {SCHEDULES: self.hook_schedules, OPTIMIZER: self.hook_optimizers}
        after_import(hooks, self.undo)

    def hook_schedules(self, module: ModuleType) -> None:
        """Count the steps of schedules."""
        for name in _STEPPING:
            schedule = getattr(module, name, None)
            if schedule is not None:
                wrap(schedule, "step", self._counting, self.undo)

    def hook_optimizers(self, module: ModuleType) -> None:
        """Count the steps of an optimizer, as long as no schedule has any."""
        handle = module.register_optimizer_step_post_hook(self._after_optimizer)
        self.undo.callback(handle.remove)

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Let a schedule's step end the one before, from start to start, optimizer and all."""

        @wraps(original)
        def run_step(schedule: Any, *arguments: Any, **settings: Any) -> Any:
            try:
                self._before_schedule(schedule)
            except Exception as error:  # noqa: BLE001 (the step must run)
                self.give_up(error)
            return original(schedule, *arguments, **settings)

        return run_step

    def _before_schedule(self, schedule: Any) -> None:
        if not self.scheduled:
            self.scheduled = True
            self.end()
            self.giver = id(schedule)
            self.begin(schedule)
        elif self.giver == id(schedule):
            self.step()

    def _after_optimizer(self, optimizer: Any, _given: Any, _settings: Any) -> None:
        try:
            if self.scheduled:
                return
            if self.giver is None:
                self.giver = id(optimizer)
                self.begin(None)
            elif self.giver == id(optimizer):
                self.step()
        except Exception as error:  # noqa: BLE001 (the job must run)
            self.give_up(error)


class CapturedBeat(Beat):
    """The beat of a job that is captured: each is a `debubble.step`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.session: Session | None = None

    def begin(self, pipeline: Any) -> None:
        """Open the capture."""
        session = begin(self.settings, pipeline)
        session.__enter__()
        self.session = session
        atexit.register(self.end)

    def step(self) -> None:
        """Pass the step on."""
        if self.session is not None:
            step()

    def give_up(self, error: Exception) -> None:
        """Say why this process is not captured any more, and leave it alone from here on."""
        why = f"{error}; {error.hint}" if isinstance(error, DebubbleError) else describe(error)
        say(f"this process is not captured: {why}")
        session, self.session = self.session, None
        if session is not None:
            with suppress(Exception):
                session.close()

    def end(self) -> None:
        """Close the capture, complete or not."""
        try:
            if self.session is not None:
                self.session.close()
        except Exception as error:  # noqa: BLE001 (the job ends as it would)
            say(f"the capture did not end well: {describe(error)}")
        finally:
            self.session = None


def wrap(owner: Any, name: str, around: Callable[[Any], Any], undo: ExitStack) -> None:
    """Put a function, or a table of them, in place of another, until `undo` is closed."""
    original = getattr(owner, name, None)
    if original is None:
        return
    stored = vars(owner).get(name)
    wrapped = around(original)
    setattr(owner, name, wrapped)

    def restore() -> None:
        if vars(owner).get(name) is not wrapped:
            return  # somebody else stands around it by now: ours stays
        if stored is None:
            delattr(owner, name)
        else:
            setattr(owner, name, stored)

    undo.callback(restore)


def after_import(hooks: Mapping[str, Callable[[ModuleType], None]], undo: ExitStack) -> None:
    """Call each hook with its module: at once where it is loaded, else as soon as it is."""
    waiting = {}
    for name, hook in hooks.items():
        module = sys.modules.get(name)
        if module is None:
            waiting[name] = hook
        else:
            hook(module)
    if waiting:
        finder = AfterImport(waiting)
        sys.meta_path.insert(0, finder)
        undo.callback(finder.targets.clear)


class AfterImport(MetaPathFinder):
    """Calls back once a module is loaded; finding and loading are left to the others."""

    def __init__(self, targets: dict[str, Callable[[ModuleType], None]]) -> None:
        self.targets = targets

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as it would be found, and put the call behind its loader.

        Where that fails the others are asked as ever, and the module gives no beat.
        """
        if fullname not in self.targets:
            return None
        try:
            call = self.targets.pop(fullname)
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _CallingLoader(spec.loader, call)
                    return spec
        except Exception as error:  # noqa: BLE001 (the job must run)
            say(f"{fullname} gives no beat: {describe(error)}")
        return None


class _CallingLoader(Loader):
    """Another loader, with a call after it."""

    def __init__(self, loader: Any, call: Callable[[ModuleType], None]) -> None:
        self.loader = loader
        self.call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to the other."""
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Let the other load the module; one that is not as expected runs as it is."""
        self.loader.exec_module(module)
        try:
            self.call(module)
        except Exception as error:  # noqa: BLE001 (the job must run)
            say(f"{module.__name__} gives no beat: {describe(error)}")
