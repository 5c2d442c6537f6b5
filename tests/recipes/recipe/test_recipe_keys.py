"""The page of all recipe keys is the one that the recipes' own descriptions give."""

from penstock.schedules.names import stages_on_ranks
from scripts.recipe_keys import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m scripts.recipe_keys --write"


def test_the_page_lists_all_families_with_several_stages_on_a_rank() -> None:
    assert stages_on_ranks() in page()
