"""README.md in → what the package index shows: its links lead to the released files.

Run by the build (`tool.hatch.metadata.hooks.custom` in pyproject.toml). In the repository links are
relative, so that they lead to the branch one reads; an index has none of those files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Of a picture, or of a page; what has an address, or lies on the same page, is left alone.
_LINK = re.compile(r"(?P<picture>!?)\[(?P<words>[^\]]*)\]\((?!https?://|#)(?P<path>[^)\s]+)\)")


def with_addresses(readme: str, home: str, version: str) -> str:
    """Return a page whose links lead to the files of that version in the repository."""

    def lead(link: re.Match[str]) -> str:
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['words']}]({home}/{kind}/v{version}/{link['path']})"

    return _LINK.sub(lead, readme)


class LongDescription(MetadataHookInterface):
    """Fills in the readme, where the home page and the version are known."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme of the package."""
        readme = Path(self.root, "README.md").read_text("utf-8")
        text = with_addresses(readme, metadata["urls"]["Homepage"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
