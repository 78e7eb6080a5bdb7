"""`python store_writer.py URL NAME COUNT`: write records; print each number once it is kept."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.measurements import sampled

from debubble.measure.store import Store

if __name__ == "__main__":
    url, name, count = sys.argv[1:]
    store = Store(url)
    for number in range(int(count)):
        store.add(name, sampled([0.1]), now_s=float(number), tags={"number": str(number)})
        print(number, flush=True)  # noqa: T201 (the acknowledgement)
