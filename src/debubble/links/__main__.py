"""`torchrun … -m debubble.links`: measures the hops between the ranks of a job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from debubble.errors import DebubbleError, UsageError
from debubble.links.live.measured import FEWEST_SAMPLES, sizes_of, write_measured
from debubble.links.live.rank import HopTest, run_rank
from debubble.units import parse_bytes
from debubble.whole_file import write_file

LARGEST = "64MiB"


@click.command("torchrun … -m debubble.links")
@click.option("--out", type=click.Path(path_type=Path), default=Path("links.json"))
@click.option("--size", metavar="SIZE", help="What the job itself sends, such as 8MiB.")
@click.option("--largest", metavar="SIZE", default=LARGEST, show_default=True)
@click.option("--samples", type=click.IntRange(min=FEWEST_SAMPLES), default=FEWEST_SAMPLES)
@click.option("--all-pairs", is_flag=True, help="Every pair of ranks, not only neighbours.")
@click.option("--backend", type=click.Choice(["nccl", "gloo"]))
@click.option("--progress", type=click.Path(path_type=Path), help="A file to write progress to.")
@click.option("--force", is_flag=True, help="Replace the file.")
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    out: Path,
    size: str | None,
    largest: str,
    samples: int,
    all_pairs: bool,
    backend: str | None,
    progress: Path | None,
    force: bool,
) -> None:
    """Measure the hops between the ranks of this job; the first rank writes them to a file."""
    if out.exists() and not force:
        raise UsageError(f"{out} is there already", hint="give another --out, or --force")

    def show(done: int, total: int) -> None:
        if progress is not None:
            progress.write_text(f"{done} {total}", "utf-8")

    job = None if size is None else parse_bytes(size)
    test = HopTest(
        sizes=sizes_of(parse_bytes(largest), job),
        job_bytes=job,
        samples=samples,
        every_pair=all_pairs,
        backend=backend,
    )
    measured = run_rank(test, show)
    if measured is not None:
        write_file(out, write_measured(measured).encode())
        click.echo(f"{out} written; next: debubble links {out}")


def main(words: Sequence[str] | None = None) -> None:
    """Run one rank; say what is wrong without a traceback."""
    try:
        command.main(args=None if words is None else list(words), standalone_mode=False)
    except DebubbleError as error:
        click.echo(f"error: {error}", err=True)
        if error.hint:
            click.echo(f"\nhint: {error.hint}", err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(2)


if __name__ == "__main__":
    main()
