"""One task for each kind of data."""

from penstock_recipes.recipe.data_sections import Digits, ImageFolder, Names, ParallelText, Text
from penstock_recipes.recipe.recipe import Recipe

from .task import Task


def build_task(recipe: Recipe) -> Task:
    """Read the data of a recipe.

    Raises:
        ConfigError: the data are not there, or the model does not fit them.
    """
    match recipe.data:
        case Text() as section:
            from .language import LanguageTask

            return LanguageTask(recipe, section)
        case Names() | ParallelText() as section:
            from .translation import TranslationTask

            return TranslationTask(recipe, section)
        case Digits() | ImageFolder() as section:
            from .images import ImageTask, open_images

            return ImageTask(recipe, open_images(section))
