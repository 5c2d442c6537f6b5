"""`penstock predict`: what the model of a run makes of new inputs."""

import sys
from pathlib import Path

import click

from penstock.cli import require_torch, say, set_option

from .eval import checkpoint_option


@click.command()
@click.argument("run", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@click.argument("inputs", metavar="[INPUT]...", nargs=-1)
@checkpoint_option
@set_option
def predict(run: Path, inputs: tuple[str, ...], which: str, overrides: tuple[str, ...]) -> None:
    """Write what the model of a run makes of each INPUT; "-" stands for the lines of standard
    input.

    Of images, INPUT is a file: a line has its name, its class and the probability of that class;
    without any INPUT all test images follow, with their true classes.  Of translation, INPUT is a
    text, after its language if there are several ("de: Haus").  Of a language model, INPUT is a
    text to continue; without any, the recipe's prompt is.

    The model is not split: it runs in this process, on the CPU.

    \b
    Examples:
      penstock predict runs/digits-1
      penstock predict runs/imagenet-1 cat.jpg dog.jpg --checkpoint newest
      penstock predict runs/names-1 'de: Deutschland' 'uk: Україна'
      penstock predict runs/gpt_small-1 'The first line'
    """
    say(f"loading PyTorch, to predict with {run}")
    require_torch()
    from penstock_recipes.train.evaluate import predict_by
    from penstock_recipes.train.run_folder import Which

    words = [
        word
        for given in inputs
        for word in (sys.stdin.read().splitlines() if given == "-" else [given])
    ]
    for text in predict_by(run, words, Which(which), overrides):
        click.echo(text)
