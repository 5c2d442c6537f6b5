"""A profile is a value: saved and read back, compared, shown, and of one model only."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.costs.layer_facts import LayerFacts
from penstock.costs.profile import boundary_bytes, kept_bytes
from penstock.errors import ConfigError, UnreadableError
from tests.profiles import at_size, profile

TWO = profile(at_size(4), at_size(8))


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    TWO.save(tmp_path / "two.json")
    assert penstock.Profile.load(tmp_path / "two.json") == TWO


def changed(path: str, value: Any) -> str:
    """Give the JSON of a profile with another value at a place; None takes it away."""
    data = json.loads(TWO.to_json())
    *way, last = path.split(".")
    held = data
    for part in way:
        held = held[int(part)] if part.isdigit() else held[part]
    if value is None:
        del held[last]
    else:
        held[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TWO.to_json()[:-40], "damaged, or no JSON"),
        ("[]", "must be an object"),
        (changed("threads", "two"), 'threads must be a whole number, and is "two"'),
        (changed("sizes.0.kinds.0.inner_bytes", None), r"it lacks sizes\[0\].kinds\[0\].inner_"),
        (changed("sizes.1.kinds.0.seconds.forward_s", "1"), r"kinds\[0\].seconds.forward_s must"),
        (changed("sizes.0.kind_of", [0, 3]), r"sizes\[0\].kind_of .* names entry 3"),
        (changed("sizes.0.saved", []), r"2 layers has sizes\[0\].saved for 0"),
        (changed("surprise", 1), "unknown key surprise"),
    ],
)
def test_a_damaged_file_is_named_with_the_place(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "two.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"two.json: .*{words}") as caught:
        penstock.Profile.load(path)
    assert "\n" not in str(caught.value)


def test_fields_that_older_files_have_are_left_out() -> None:
    assert penstock.Profile.from_json(changed("weights.0.partial_bytes", 0)) == TWO


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match=r"none.json: it cannot be read: No such file"):
        penstock.Profile.load(tmp_path / "none.json")
    with pytest.raises(UnreadableError, match=r"two.json: it cannot be written"):
        TWO.save(tmp_path / "folder" / "two.json")


def test_another_model_is_refused_by_its_first_layer_that_differs() -> None:
    TWO.check_model(TWO.layers)
    head = LayerFacts.of("head", "Tanh", 0, {})
    with pytest.raises(ConfigError, match=r"layer 1 is '1' \(Linear\) in the profile and 'head'"):
        TWO.check_model((TWO.layers[0], head))
    with pytest.raises(ConfigError, match=r"layer 2, 'head' \(Tanh\), is in the model only"):
        TWO.check_model((*TWO.layers, head))


def test_a_layer_keeps_what_it_saves_and_each_cut_is_crossed_by_each_storage_once() -> None:
    at = at_size(4)
    assert kept_bytes(at) == [400 + 16, 400 + 16 + 32]
    assert boundary_bytes(at) == [16 + 32, 0]
    shared = replace(at, values=(at.values[0], replace(at.values[1], storage=0), *at.values[2:]))
    assert boundary_bytes(shared) == [32, 0]


def test_a_table_has_a_row_for_each_layer_and_size() -> None:
    text = str(TWO)
    assert text.count("Linear") == 4
    assert "measured on a with 1 thread\n" in text
    assert "a micro-batch of 8 samples" in text
    line = next(line for line in text.splitlines() if line.startswith("1 "))
    assert line.split()[2:10] == ["5", "s", "10", "s", "5.5", "s", "5", "s"]
    assert "10.0%" in line
    counted = str(profile(at_size(4, is_measured=False), measured_on=None))
    assert "counted" in counted
    assert "spread" not in counted
