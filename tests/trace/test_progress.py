"""What takes long is said on a terminal, and logged elsewhere."""

import io
import logging
import sys
import time
from threading import Event

import pytest
from torch import Tensor, nn

import penstock
from penstock.cli.main import run
from penstock.trace import progress
from tests.model.capture.any_models.chain import WIDTH, Chain, inputs


class Terminal(io.StringIO):
    """Notes what is written, as a terminal would show it."""

    def __init__(self) -> None:
        super().__init__()
        self.was_written = Event()

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self.was_written.set()


def test_what_takes_long_is_said_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    with progress.saying("counting"):
        assert terminal.was_written.wait(60)
        assert terminal.getvalue() == "penstock: counting ...\n"


def test_what_is_quick_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "AFTER_S", 3600.0)
    with progress.saying("counting"):
        pass
    assert terminal.getvalue() == ""


def test_long_work_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(time, "monotonic", iter((0.0, 4.0, 11.0, 15.0, 22.0)).__next__)
    count = progress.Count("plans")
    for _ in range(4):
        count.add()
    said = ["penstock: plans: 2 in 11 s ...", "penstock: plans: 4 in 22 s ..."]
    assert terminal.getvalue().splitlines() == said


def test_a_file_gets_no_lines_but_the_log_does(capsys, caplog) -> None:
    with caplog.at_level(logging.INFO, "penstock"):
        progress.say("counting")
    assert capsys.readouterr().err == "" and caplog.messages == ["counting"]


class Slow(nn.Linear):
    """Goes on when the terminal shows something."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(sys.stderr, Terminal)
        assert sys.stderr.was_written.wait(60)
        return super().forward(x)


def test_a_capture_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    model = Chain()
    model.blocks[1] = Slow(WIDTH, WIDTH)
    penstock.capture(model, inputs(), check=False)
    assert terminal.getvalue() == (
        "penstock: running Chain on the example, to find its blocks ...\n"
    )


def test_train_says_at_once_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run(["train", "no-such-recipe.toml"]) == 2
    first = terminal.getvalue().splitlines()[0]
    assert first == "penstock: loading PyTorch, to train no-such-recipe.toml ..."


def test_a_long_simulation_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("penstock.cli.simulate._MANY", 10)
    assert run(["simulate"]) == 0
    said = terminal.getvalue()
    assert "making the schedule" in said and "simulating its instructions" in said
