"""The table of deliberate faults fits the code; the script itself sees them caught."""

from pathlib import Path

import pytest

from scripts.deliberate_faults.__main__ import FAULTS, chosen
from scripts.deliberate_faults.fault import CAUGHT, Fault, outcome

ROOT = Path(__file__).parents[2]


def test_what_each_fault_replaces_is_in_the_code_once() -> None:
    places = {f.name: (ROOT / f.file).read_text().count(f.right) for f in FAULTS}
    assert {name: count for name, count in places.items() if count != 1} == {}


def test_each_fault_names_the_file_of_its_test_and_a_test_in_it() -> None:
    def is_there(fault: Fault) -> bool:
        path, _, test = fault.test.partition("::")
        name = test.partition("[")[0]
        return (ROOT / path).is_file() and f"def {name}" in (ROOT / path).read_text()

    assert [fault.name for fault in FAULTS if not is_there(fault)] == []


def test_ten_parts_have_each_fault_once() -> None:
    parts = [fault.name for n in range(10) for fault in chosen([], f"{n}/10")]
    assert sorted(parts) == sorted(fault.name for fault in FAULTS)


def test_a_fault_is_caught_only_where_its_own_test_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that passes, one that is gone and a place that is gone are told apart."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # most of the time of a start
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    (tmp_path / "code.py").write_text("VALUE = 1\n")
    (tmp_path / "test_code.py").write_text(
        "from code import VALUE\ndef test_it():\n    assert VALUE == 1\n"
    )

    def of(right: str, wrong: str, test: str = "test_code.py", only: str = "") -> str:
        return outcome(Fault("it", "code.py", right, wrong, test, only), tmp_path)

    assert of("VALUE = 1", "VALUE = 2") == CAUGHT
    assert of("VALUE = 1", "VALUE = 1 ") == "UNNOTICED"
    assert of("VALUE = 3", "") == "ITS PLACE is there 0 times"
    assert of("VALUE = 1", "VALUE = 2", only="another") == "ITS TEST is gone (pytest: 5)"
    assert of("VALUE = 1", "VALUE = 2", test="test_gone.py") == "ITS TEST is gone (pytest: 4)"
    assert (tmp_path / "code.py").read_text() == "VALUE = 1\n"


def test_no_two_faults_have_the_same_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
