"""The table of deliberate faults fits the code; the script itself sees them caught."""

from pathlib import Path

from scripts.deliberate_faults.__main__ import FAULTS

ROOT = Path(__file__).parents[2]


def test_what_each_fault_replaces_is_in_the_code() -> None:
    gone = [f.name for f in FAULTS if f.right not in (ROOT / f.file).read_text()]
    assert gone == [], "these faults no longer fit the code"


def test_no_two_faults_have_the_same_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
