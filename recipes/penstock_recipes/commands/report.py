"""`penstock report`: a run as one HTML page."""

from pathlib import Path

import click


@click.command()
@click.argument("run", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@click.option(
    "--output",
    metavar="FILE.html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it; an earlier report there is renewed, no other file is overwritten.  "
    "[default: report.html in the run folder]",
)
@click.option(
    "--predicted",
    metavar="FILE.json",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A timeline to show above the measured one, as `timeline.to_json()` writes it.  "
    "[default: predicted.json in the run folder, if there]",
)
def report(run: Path, output: Path | None, predicted: Path | None) -> None:
    """Write the report of a run as one HTML page, which needs no network.

    It shows the timed step rank by rank, where its time went, memory, the curves of loss and
    scores, the plan with its reasons, the recipe and the environment.  `penstock train` writes it
    at the end of every run.

    \b
    Examples:
      penstock report runs/digits-1
      penstock report runs/digits-1 --output digits.html --predicted predicted.json
    """
    from penstock.trace.page import write_page
    from penstock_recipes.train.run_files import REPORT
    from penstock_recipes.train.run_page import page_of

    target = run / REPORT if output is None else output
    write_page(page_of(run, predicted), target)
    click.echo(str(target))
