"""Presets name the source of each figure, and have figures that such a machine can have."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.costs.cluster import Cluster
from penstock.costs.cluster.files import device_preset, preset_names, preset_text
from penstock.costs.records import PRODUCTS, Operator, Part
from penstock.costs.roofline import operator_seconds
from penstock.errors import ConfigError

ROOT = Path(__file__).parents[3]

NAMES = preset_names("devices")
CLUSTERS = preset_names("clusters")
FILES = [("devices", name) for name in NAMES] + [("clusters", name) for name in CLUSTERS]

SOURCE = re.compile(r"^source = (?!.*each figure's source is beside it)", re.MULTILINE)
"""The line of a source that explains the figures of its table."""
FIGURE = re.compile(r'[\w".]+ = [^"#]*\d')
"""The line of a number, or of several."""
RANGE = re.compile(r"= (\S+)  # between (\S+) and ([^\s,]+)")
LIMIT = re.compile(r"([\d.]+) GB/s (?:each way )?(?:at most|by its specification)")
"""The line rate in a link's source."""
OF_OTHER_WORDS = {"p3.16xlarge", "tpu-v2-8", "tpu-v3-8"}
"""Clusters whose links have no single line rate, or one in Gbit/s."""


def without_source(text: str) -> list[str]:
    """Return the lines of a preset's file whose figures have no source.

    A comment explains its line, or the lines below it up to the next comment or empty line.  The
    source of a table explains its figures, and the source of a cluster those of its hosts.
    """
    first, *others = re.split(r"\n(?=\[)", text)
    tables = [x for x in others if not (x.startswith("[[hosts]]") and SOURCE.search(first))]
    bare: list[str] = []
    for table in [first, *tables]:
        is_explained = bool(SOURCE.search(table))
        below_comment = False
        for line in table.splitlines():
            if line.startswith("#"):
                below_comment = True
            elif "  # " in line or not line:
                below_comment = False
            elif FIGURE.match(line) and not (is_explained or below_comment):
                bare.append(line)
    return bare


def test_docs_list_the_presets() -> None:
    profile, clusters = (
        (ROOT / "docs" / page).read_text() for page in ("profile.md", "clusters.md")
    )
    names = profile.split("one of these\nnames: ")[1].split(". Measured")[0]
    assert {*re.findall(r"`(.+?)`", names)} == {*NAMES}
    rows = clusters.split("| name | cluster |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    first = [name for row in rows for name in re.findall(r"`(.+?)`", row.split("|")[1])]
    assert sorted(first) == [*CLUSTERS]


@pytest.mark.parametrize(("folder", "name"), FILES)
def test_each_figure_of_a_file_has_a_source(folder: str, name: str) -> None:
    assert without_source(preset_text(folder, name)) == []


def test_figures_without_a_source_are_found() -> None:
    device = """name = "a100"
source = "NVIDIA A100; each figure's source is beside it"
# nvidia-smi
memory_bytes = 42_505_076_736
bytes_per_s = 1.2e12  # between 1e12 and 1.4e12
units = 108

[flops_per_s]
float32 = 19.5e12
# data sheet
float64 = 9.7e12
"""
    assert without_source(device) == ["units = 108", "float32 = 19.5e12"]
    cluster = """name = "two"
source = "eight devices, 400 Gbit/s"
[[hosts]]
devices = { a = 8 }
[links.nvlink]
bytes_per_s = 2e11
[links.network]
source = "a card of 400 Gbit/s"
bytes_per_s = 5e10
"""
    assert without_source(cluster) == ["bytes_per_s = 2e11"]
    nobodys = cluster.replace('source = "eight devices, 400 Gbit/s"\n', "")
    assert without_source(nobodys) == ["devices = { a = 8 }", "bytes_per_s = 2e11"]


@pytest.mark.parametrize(("folder", "name"), FILES)
def test_a_figure_between_two_numbers_is_their_middle(folder: str, name: str) -> None:
    for figure, low, high in RANGE.findall(preset_text(folder, name)):
        assert float(low) < float(high)
        assert float(figure) == pytest.approx((float(low) + float(high)) / 2, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_a_device_is_within_its_data_sheet(name: str) -> None:
    device, text = device_preset(name), preset_text("devices", name)
    assert device.name == name
    sizes = re.findall(r"(\d+) GB;", device.source)  # makers mean GiB
    rates = re.findall(r"(\S+) by the data\s(?:# )?sheet|data sheet's (\S+e\d+)", text)
    assert device.torch_type == "xla" or (sizes and rates)
    assert all(device.memory_bytes <= int(size) * 2**30 for size in sizes)
    assert all(device.bytes_per_s < float("".join(either)) for either in rates)
    assert all(share <= 1 or "Winograd" in text for share in device.efficiency.values())


@pytest.mark.parametrize("name", CLUSTERS)
def test_links_are_within_their_line_rates(name: str) -> None:
    for link in Cluster.load(name).links.values():
        limits = [float(rate) * 1e9 for rate in LIMIT.findall(link.source)]
        assert limits or name in OF_OTHER_WORDS
        assert link.bytes_per_s <= min(limits, default=link.bytes_per_s)


def test_a_device_that_is_another_but_for_some_figures_has_its_own_name() -> None:
    h800, h100 = Cluster.load("hgx-h800").device_of(0), device_preset("h100")
    assert (h800.name, h800.flops_per_s["float64"]) == ("h800", 1e12)
    assert h800.flops_per_s["bfloat16"] == h100.flops_per_s["bfloat16"]
    slow, fast = (Cluster.load(name).route(0, 1) for name in ("hgx-a800", "dgx-a100"))
    assert slow.bytes_per_s < 2e11 < fast.bytes_per_s


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


@pytest.mark.parametrize("name", CLUSTERS)
def test_each_cluster_names_devices_that_are_described(name: str) -> None:
    assert {device.source for device in Cluster.load(name).devices.values()} != {""}


def test_pricing_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from penstock.costs.cluster.files import device_preset\n"
        "from penstock.costs.roofline import operator_seconds\n"
        "device_preset('h100')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
