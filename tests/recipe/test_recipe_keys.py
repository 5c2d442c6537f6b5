"""The page of all recipe keys is the one that the recipes' own descriptions give."""

from scripts.recipe_keys import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m scripts.recipe_keys --write"
