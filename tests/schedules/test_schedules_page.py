"""The page of all schedules says what the simulator says."""

from scripts.schedules_page import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m scripts.schedules_page --write"
