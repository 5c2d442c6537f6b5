"""A card beside its preset: what is off is said figure by figure, with the line that mends it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.cli.main import run
from penstock.costs.cluster import Cluster, Device, Host
from penstock.costs.cluster.files import device_preset, preset_of
from penstock.doctor.calibration.calibrate import Calibration
from penstock.doctor.calibration.card import (
    CardSizes,
    Compared,
    Measure,
    compare,
    compared_lines,
    file_values,
)
from penstock.doctor.calibration.figures import Figure, Run, Spread

CPU = torch.device("cpu")
ONE = CardSizes(
    products=(64,),
    heads=(8,),
    lengths=(16,),
    tokens=32,
    width=16,
    copy_bytes=1 << 12,
    host_bytes=64,
)
GIB = 1 << 30
H100 = device_preset("h100")


def always(seconds: float) -> Device:
    """Return a preset whose every kernel takes so long."""
    return replace(H100, flops_per_s={"float32": 1e30}, bytes_per_s=1e30, floor_s=seconds, gap_s=0)


def took(seconds: float) -> Measure:
    def measure(run: Run, budget_s: float, wait: Callable[[], None]) -> Spread:
        run()
        return Spread(seconds, seconds, seconds)

    return measure


@pytest.mark.parametrize(
    ("name", "num_bytes", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 80 * GIB, "h100"),
        ("NVIDIA A100-SXM4-40GB", 40 * GIB, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 80 * GIB, "a100-80gb"),
        ("Tesla P100-PCIE-16GB", 16 * GIB, "p100-pcie"),
        ("NVIDIA GeForce RTX 4090", 24 * GIB, "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", 24 * GIB, None),
        ("NVIDIA GB200", 186 * GIB, "gb200"),
    ],
)
def test_a_card_is_known_by_its_chip_and_its_memory(
    name: str, num_bytes: int, preset: str | None
) -> None:
    found = preset_of(name, num_bytes)
    assert (found and found.name) == preset


def test_the_preset_is_off_by_what_it_predicts_over_what_is_measured() -> None:
    found = {own.figure.name: own for own in compare(CPU, always(2e-3), 0.0, ONE, took(1e-3))}
    product = found["product float32, 64"]
    assert product.figure.spread.middle == pytest.approx(2 * 64**3 / 1e-3)
    assert product.preset == pytest.approx(2 * 64**3 / 2e-3)
    assert product.off == pytest.approx(-0.5)
    assert found["a copy in memory"].value == pytest.approx((1 << 12) / 1e-3)
    assert found["a copy in memory"].preset == 1e30
    kernels = [name for name in found if name.startswith(("product", "attention"))]
    assert len(kernels) == 3  # one type has a peak; attention goes forward and backward


def test_the_preset_with_the_lines_predicts_what_was_measured() -> None:
    slow = replace(H100, flops_per_s={"bfloat16": 1e9, "float32": 1e9}, bytes_per_s=1e12)
    values = file_values(compare(CPU, slow, 0.0, ONE, took(0.01)))
    shares = {
        key.removeprefix("efficiency."): value
        for key, value in values.items()
        if key.startswith("efficiency.")
    }
    assert {*shares} == {"gemm.float32", "gemm.bfloat16", "attention.bfloat16"}
    mended = replace(slow, efficiency=shares)
    again = compare(CPU, mended, 0.0, ONE, took(0.01))
    products = [own for own in again if own.figure.name.startswith("product")]
    assert [own.off for own in products] == pytest.approx([0.0, 0.0], abs=1e-3)
    assert values["host_bytes_per_s"] == pytest.approx(64 / 0.01)


def test_the_lines_are_those_of_a_file_of_a_cluster(tmp_path: Path) -> None:
    lines = [*compared_lines("h100", compare(CPU, H100, 0.0, ONE))]
    first = lines.index("[devices.h100]")
    assert any("product bfloat16, 64" in line and "%" in line for line in lines[:first])
    path = tmp_path / "cluster.toml"
    path.write_text(
        "\n".join(['name = "x"', *lines[first:], '[[hosts]]\nname = "h"\ndevices = { h100 = 1 }'])
    )
    device = Cluster.load(path).devices["h100"]
    assert device.bytes_per_s != H100.bytes_per_s and device.memory_bytes == H100.memory_bytes
    assert device.efficiency["gemm.bfloat16"] != H100.efficiency["gemm.bfloat16"]
    assert device.efficiency["gemm.float16"] > 0 and device.issue_s > 0


def test_the_command_compares_cards_with_their_presets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hosts = (Host(name="mine", devices=("gpu0",)),)
    cluster = Cluster(name="mine", devices={"gpu0": H100}, hosts=hosts, links={})
    measured = Calibration(cluster=cluster, figures=())
    copy = Figure("a copy in memory", "B/s", Spread(2e12, 2e12, 2e12))
    cards = {"h100": [Compared(copy, 3e12, "bytes_per_s", 2e12)]}
    monkeypatch.setattr("penstock.doctor.calibration.calibrate", lambda budget_s: measured)
    monkeypatch.setattr("penstock.doctor.calibration.card.compared_cards", lambda budget_s: cards)
    assert run(["doctor", "--calibrate"]) == 0
    said = capsys.readouterr().out
    assert "+50.0%" in said and "bytes_per_s = 2e+12" in said
    assert run(["doctor", "--calibrate", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["presets"]["h100"]
    assert (told["off"], told["key"], told["value"]) == (0.5, "bytes_per_s", 2e12)
