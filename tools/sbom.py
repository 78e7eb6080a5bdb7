"""An environment with debubble in it in → its software bill of materials, as CycloneDX 1.6 JSON.

    python tools/sbom.py > debubble.cdx.json

Run it by the Python of that environment. What debubble needs is listed with versions and licences,
and what each needs in turn; extras that are not installed are not in it.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from uuid import NAMESPACE_URL, uuid5

_NAME = re.compile(r"^[A-Za-z0-9._-]+")
_ROOT = "debubble"


def needs_of(name: str) -> list[str]:
    """Return what a distribution needs, of what is installed; extras are left out."""
    found = set()
    for line in metadata.requires(name) or []:
        words, _, marker = line.partition(";")
        match = _NAME.match(words.strip())
        if match is None or "extra" in marker:
            continue
        try:
            found.add(metadata.distribution(match[0]).metadata["Name"])
        except metadata.PackageNotFoundError:  # for another system, or another Python
            continue
    return sorted(found)


def closure(root: str) -> dict[str, list[str]]:
    """Return everything that is needed, each with its own needs."""
    needs: dict[str, list[str]] = {}
    waiting = [root]
    while waiting:
        name = waiting.pop()
        if name not in needs:
            needs[name] = needs_of(name)
            waiting += needs[name]
    return needs


def component(name: str) -> dict[str, object]:
    """Describe a distribution."""
    about = metadata.metadata(name)
    said = about.get("License-Expression")
    licence = (
        {"expression": said} if said else {"license": {"name": about.get("License", "?")[:80]}}
    )
    package = f"pkg:pypi/{name.lower().replace('_', '-')}@{about['Version']}"
    return {
        "type": "application" if name == _ROOT else "library",
        "bom-ref": package,
        "name": name,
        "version": about["Version"],
        "purl": package,
        "licenses": [licence],
    }


def bill() -> dict[str, object]:
    """Return the bill: the same environment gives the same bill."""
    needs = closure(_ROOT)
    parts = {name: component(name) for name in sorted(needs)}
    refs = {name: str(part["bom-ref"]) for name, part in parts.items()}
    serial = uuid5(NAMESPACE_URL, " ".join(refs.values()))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": parts[_ROOT]},
        "components": [part for name, part in parts.items() if name != _ROOT],
        "dependencies": [
            {"ref": refs[name], "dependsOn": [refs[need] for need in needs[name]]}
            for name in sorted(needs)
        ],
    }


if __name__ == "__main__":
    json.dump(bill(), sys.stdout, indent=2)
    print()
