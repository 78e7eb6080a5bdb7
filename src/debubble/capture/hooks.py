"""Inside a job that was started to be captured: its own beat in → `debubble.step` out.

A step of a torch.distributed.pipelining schedule is the beat; in jobs without one, a step of the
first optimizer. torch is not imported before the job does so itself. Whatever goes wrong in here is
said on stderr, and the job goes on as if nothing had been asked.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from debubble.capture.session import begin, say, step
from debubble.capture.settings import Settings, read_order
from debubble.errors import DebubbleError

if TYPE_CHECKING:
    from debubble.capture.recording import Session

_SCHEDULES = "torch.distributed.pipelining.schedules"
_OPTIMIZER = "torch.optim.optimizer"
_STEPPING = ("PipelineScheduleSingle", "PipelineScheduleMulti")


def install() -> None:
    """Wait for the modules that can give the beat, where a capture was ordered."""
    settings = read_order(os.environ)
    if settings is None:
        return
    beat = Beat(settings)
    hooks = AfterImport({_SCHEDULES: beat.hook_schedules, _OPTIMIZER: beat.hook_optimizers})
    sys.meta_path.insert(0, hooks)


class Beat:
    """The job's own rhythm, from whichever of its parts gives one."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.session: Session | None = None
        self.giver: int | None = None
        """Whose steps are counted: a job may have several optimizers, or schedules."""
        self.scheduled = False

    def hook_schedules(self, module: ModuleType) -> None:
        """Count the steps of schedules."""
        for name in _STEPPING:
            schedule = getattr(module, name, None)
            if schedule is not None:
                schedule.step = self._counting(schedule.step)

    def hook_optimizers(self, module: ModuleType) -> None:
        """Count the steps of an optimizer, as long as no schedule has any."""
        module.register_optimizer_step_post_hook(self._after_optimizer)

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Let a schedule's step end the one before, from start to start, optimizer and all."""

        @wraps(original)
        def run_step(schedule: Any, *arguments: Any, **settings: Any) -> Any:
            try:
                self._before_schedule(schedule)
            except Exception as error:  # noqa: BLE001 (the step must run)
                self._give_up(error)
            return original(schedule, *arguments, **settings)

        return run_step

    def _before_schedule(self, schedule: Any) -> None:
        if not self.scheduled:
            self.scheduled = True
            self._close()
            self.giver = id(schedule)
            self._open(schedule)
        elif self.session is not None and self.giver == id(schedule):
            step()

    def _after_optimizer(self, optimizer: Any, _given: Any, _settings: Any) -> None:
        try:
            if self.scheduled:
                return
            if self.giver is None:
                self.giver = id(optimizer)
                self._open(None)
            elif self.session is not None and self.giver == id(optimizer):
                step()
        except Exception as error:  # noqa: BLE001 (the job must run)
            self._give_up(error)

    def _open(self, pipeline: Any) -> None:
        session = begin(self.settings, pipeline)
        session.__enter__()
        self.session = session
        atexit.register(self._close)

    def _give_up(self, error: Exception) -> None:
        """Say why this process is not captured any more, and leave it alone from here on."""
        hint = f"; {error.hint}" if isinstance(error, DebubbleError) else ""
        kind = "" if isinstance(error, DebubbleError) else f"{type(error).__name__}: "
        say(f"this process is not captured: {kind}{error}{hint}")
        session, self.session = self.session, None
        if session is not None:
            with suppress(Exception):
                session.close()

    def _close(self) -> None:
        try:
            if self.session is not None:
                self.session.close()
        except Exception as error:  # noqa: BLE001 (the job ends as it would)
            say(f"the capture did not end well: {type(error).__name__}: {error}")
        finally:
            self.session = None


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
            say(f"{fullname} gives no beat: {error}")
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
            say(f"{module.__name__} gives no beat: {error}")
