"""`penstock compare`: runs beside each other, as a text table and an HTML page."""

from pathlib import Path

import click


@click.command()
@click.argument(
    "runs", metavar="RUN_FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--output",
    metavar="FILE.html",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("compare.html"),
    show_default=True,
    help="Where to write the page; an earlier page there is renewed, other files are kept.",
)
def compare(runs: tuple[Path, ...], output: Path) -> None:
    """Compare runs: print what differs, and write their curves over each other as one HTML page.

    The page needs no network.

    \b
    Examples:
      penstock compare runs/digits-1 runs/digits-2
      penstock compare runs/digits-* --output digits.html
    """
    if len(runs) < 2:
        raise click.UsageError("give at least two run folders; `penstock report` shows one")
    from penstock.trace.page import write_page
    from penstock_recipes.train.compare_page import compare_page, compare_runs

    comparison = compare_runs(runs)
    click.echo(str(comparison))
    write_page(compare_page(comparison), output)
    click.echo(f"curves: {output}")
