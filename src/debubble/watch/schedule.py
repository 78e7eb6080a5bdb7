"""When a server is captured next: every so often, with jitter, never in quiet hours."""

from __future__ import annotations

from datetime import datetime, timedelta

from debubble.watch.config import Trigger

# Under pressure a capture waits at first so long, then twice as long each time.
_FIRST_WAIT = 0.05
_LONGEST_WAITS = 4.0


def next_capture(trigger: Trigger, last_s: float | None, now_s: float, chance: float) -> float:
    """Return when to capture; `chance` from 0 to 1 spreads servers that were started at once."""
    if last_s is None:
        due = now_s + chance * trigger.jitter * trigger.every_s
    else:
        due = last_s + trigger.every_s * (1 + trigger.jitter * (2 * chance - 1))
    return after_quiet_hours(trigger, max(due, now_s))


def after_quiet_hours(trigger: Trigger, at_s: float) -> float:
    """Return the time itself, or the end of the quiet hours that it lies in."""
    for _ in range(len(trigger.quiet_hours) + 1):
        local = datetime.fromtimestamp(at_s).astimezone()
        for begin, end in trigger.quiet_hours:
            clock = local.time().replace(tzinfo=None)
            inside = begin <= clock < end if begin <= end else clock >= begin or clock < end
            if inside:
                ends = local.replace(hour=end.hour, minute=end.minute, second=0, microsecond=0)
                at_s = (ends if ends > local else ends + timedelta(days=1)).timestamp()
                break
        else:
            return at_s
    return at_s


def back_off(trigger: Trigger, refusals: int) -> float:
    """Return how long to wait for a server that is pressed or does not answer."""
    return float(trigger.every_s * min(_FIRST_WAIT * 2**refusals, _LONGEST_WAITS))
