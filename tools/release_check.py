"""Build what a release would be, and try it as a stranger would: from the wheel alone.

    python tools/release_check.py --out dist --python python3.11 --python python3.12

Wheel and sdist are built, described well enough for an index, and hold what they should. Then, for
each Python: an empty environment, the wheel, one command from traces to a verdict. The bill of
materials is written beside them. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRACES = ROOT / "tests" / "data" / "h200" / "1f1b_p3_m7"
IN_THE_WHEEL = (
    "debubble/py.typed",
    "debubble/report/answers/schemas/find.json",
    "debubble/annexes/watch/files/dashboard.json",
    "debubble/report/html/assets/report.css",
)
# Without these the core must do; with torch, jobs are captured as well.
NOT_NEEDED = ("torch", "pandas", "sqlalchemy", "distributed", "pyarrow")


def run(words: list[str], folder: Path, **settings: str) -> str:
    """Run a program in a folder, and return what it printed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words, cwd=folder, env=inherited | settings, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def versions() -> dict[str, str]:
    """Return the version wherever it is written."""
    written = {
        "src/debubble/__init__.py": r'^__version__ = "([^"]+)"',
        "CITATION.cff": r"^version: (\S+)",
    }
    found = {}
    for file, pattern in written.items():
        match = re.search(pattern, (ROOT / file).read_text("utf-8"), re.MULTILINE)
        found[file] = match[1] if match else "none"
    return found


def check_files(wheel: Path, sdist: Path, version: str) -> None:
    """See that both are of that version and hold what they should, and no tests or traces."""
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in IN_THE_WHEEL if name not in names]
    stray = [name for name in names if not name.startswith(("debubble/", "debubble-"))]
    if missing or stray or f"-{version}-" not in wheel.name:
        raise SystemExit(f"{wheel.name}: missing {missing}, stray {stray}, version {version}")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    lost = [name for name in ("pyproject.toml", "LICENSE", "tests/conftest.py") if name not in held]
    if lost:
        raise SystemExit(f"{sdist.name}: missing {lost}")


def check_installed(wheel: Path, python: str, bill: Path | None) -> str:
    """Install the wheel into an empty environment, and go from traces to a verdict."""
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        run([python, "-m", "venv", "empty"], folder)
        own = str(folder / "empty" / "bin" / "python")
        pip = [own, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        run([*pip, str(wheel), "--constraint", str(ROOT / "constraints.txt")], folder)
        command = str(folder / "empty" / "bin" / "debubble")
        found = json.loads(run([command, "find", str(TRACES), "--json=brief"], folder))
        planned = json.loads(run([command, "plan", str(TRACES), "--json=brief"], folder))
        look = f"import importlib.util as u; print([n for n in {NOT_NEEDED} if u.find_spec(n)])"
        extra = run([own, "-c", look], folder).strip()
        if extra != "[]":
            raise SystemExit(f"the wheel alone brings {extra}")
        if bill is not None:
            bill.write_text(run([own, str(ROOT / "tools" / "sbom.py")], folder), "utf-8")
        version = run([own, "-c", "import platform; print(platform.python_version())"], folder)
        size = sum(file.stat().st_size for file in (folder / "empty").rglob("*") if file.is_file())
    return (
        f"Python {version.strip()}, {size / 1e6:.0f} MB installed: "
        f"{found['verdict']} {planned['verdict']}"
    )


def main() -> None:
    """Build, check, install, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", action="append", help="A Python to install into; again.")
    asked = parser.parse_args()
    said = versions()
    if len(set(said.values())) != 1:
        raise SystemExit(f"versions differ: {said}")
    [version] = set(said.values())
    asked.out.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "build", "--outdir", str(asked.out.resolve())], ROOT)
    wheel = asked.out.resolve() / f"debubble-{version}-py3-none-any.whl"
    sdist = asked.out.resolve() / f"debubble-{version}.tar.gz"
    run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)], ROOT)
    check_files(wheel, sdist, version)
    print(
        f"{wheel.name} {wheel.stat().st_size:,} bytes, {sdist.name} {sdist.stat().st_size:,} bytes"
    )
    bill: Path | None = asked.out.resolve() / f"debubble-{version}.cdx.json"
    for python in asked.python or [sys.executable]:
        print(check_installed(wheel, python, bill))
        bill = None


if __name__ == "__main__":
    main()
