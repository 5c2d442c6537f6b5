"""Devices can be had by name, and each has figures that such a thing can have."""

import subprocess
import sys

import pytest

from penstock.costs.cluster import Cluster
from penstock.costs.cluster.presets import device_preset, preset_names, preset_text
from penstock.costs.records import PRODUCTS, Operator, Part
from penstock.costs.roofline import operator_seconds
from penstock.errors import ConfigError

NAMES = preset_names("devices")


def test_the_devices_of_the_literature_are_there() -> None:
    named = (
        "p100-pcie p40-pcie v100-sxm2 a100-40gb a100-80gb h100 h200 b200 tpu-v2-core tpu-v3-core"
    )
    assert set(NAMES) >= set(named.split())


@pytest.mark.parametrize("name", NAMES)
def test_a_device_is_called_as_its_file_and_says_where_each_figure_is_from(name: str) -> None:
    device = device_preset(name)
    assert device.name == name
    assert device.source
    for paragraph in preset_text("devices", name).split("\n\n"):
        is_explained = False
        for line in paragraph.splitlines():
            is_explained = is_explained or line.startswith("#")
            is_words = line.startswith(("[", "name", "source", "torch_type"))
            assert is_words or is_explained or "  # " in line, line


@pytest.mark.parametrize("name", NAMES)
def test_a_large_product_takes_longer_than_its_peak_and_less_than_four_times_as_long(name) -> None:
    device = device_preset(name)
    size = 8192
    for dtype, peak in device.flops_per_s.items():
        for kind in PRODUCTS:
            product = Operator(
                name=kind,
                part=Part.FORWARD,
                flops=2 * size**3,
                num_bytes=3 * size**2,
                dims=(size, size, size),
                dtype=dtype,
            )
            if kind == "gemm":
                took_s = operator_seconds(product, device)
                assert product.flops / peak < took_s < 4 * product.flops / peak


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_moves_what_it_keeps_to_its_host_more_slowly_than_it_copies_it(name: str) -> None:
    device = device_preset(name)
    assert (device.host_bytes_per_s is None) == (device.torch_type == "xla")  # nobody says
    if device.host_bytes_per_s is not None:
        assert device.host_bytes_per_s < device.bytes_per_s / 10


def test_a_name_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'h1000'.*a100-40gb.*v100-sxm2"):
        device_preset("h1000")


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_each_cluster_names_devices_that_are_described(name: str) -> None:
    assert {device.source for device in Cluster.load(name).devices.values()} != {""}


def test_pricing_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from penstock.costs.cluster.presets import device_preset\n"
        "from penstock.costs.roofline import operator_seconds\n"
        "device_preset('h100')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
