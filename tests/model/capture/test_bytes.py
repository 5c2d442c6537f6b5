"""What crosses between stages is what lives there, and nothing passes through a third one."""

from typing import Any

import pytest
import torch

import penstock
from penstock import schedules
from penstock.model.capture.stages import CutModel
from penstock.model.layers import Layers
from tests.model.capture.any_models.lists import REQUIRED
from tests.model.capture.running import captured_of, loss

BY_NAME = {model.name: model for model in REQUIRED}
NUM_MICROBATCHES = 2


def traced(
    name: str, partition: list[int], mesh: penstock.Mesh | None = None, inputs: str = "first"
) -> tuple[dict[tuple[int, int], int], Layers]:
    """Train one step of 2 micro-batches of 1; give the bytes by edge."""
    model, inputs_of = BY_NAME[name].make()
    layers = penstock.capture(model.train(), inputs_of(1), inputs=inputs, check=False)
    options: dict[str, Any] = {"partition": partition, "mesh": mesh}
    options |= {"num_microbatches": NUM_MICROBATCHES, "loss": loss}
    options |= {"schedule": schedules.one_f_one_b, "threads_per_stage": 1, "trace": True}
    with penstock.Pipeline(layers, **options) as pipe:
        pipe.train_step(inputs_of(NUM_MICROBATCHES), torch.zeros(NUM_MICROBATCHES))
        assert pipe.last_timeline is not None
        return pipe.last_timeline.moved_bytes(), layers


def check_unet(mesh: penstock.Mesh | None = None) -> None:
    """stem | down 0 | down 1, widen 0, up 0 | widen 1, up 1, head."""
    found, _ = traced("unet", [1, 1, 3, 3], mesh)
    pooled_stem, stem = 8 * 8 * 8, 8 * 16 * 16
    pooled_down, down = 16 * 4 * 4, 16 * 8 * 8
    up = 16 * 8 * 8
    once = {(0, 1): pooled_stem, (0, 3): stem, (1, 2): pooled_down + down, (2, 3): up}
    expected = {edge: 4 * NUM_MICROBATCHES * values for edge, values in once.items()}
    assert found == expected | {(b, a): moved for (a, b), moved in expected.items()}


def check_t5(mesh: penstock.Mesh | None = None) -> None:
    """Two stages of the encoder and two of the decoder, which all but one use the embedding."""
    found, layers = traced("t5", [2, 4, 3, 4], mesh, inputs="everywhere")
    cut = CutModel(captured_of(layers), (2, 4, 3, 4))
    infos = {v: i for of_mode in captured_of(layers).recorded for v, i in of_mode.infos.items()}
    tied = {t.value: captured_of(layers).sizes[t.names[0]] * 4 for t in cut.tied}
    assert [t.stages for t in cut.tied] == [(0, 2, 3)]
    for stage, of_stage in enumerate(cut.sends):
        for peer, values in of_stage.items():
            lives = sum(
                tied[v] if v in tied else NUM_MICROBATCHES * infos[v].num_bytes for v in values
            )
            assert found.pop((stage, peer)) == lives, (stage, peer)
    encoded = [v for v in cut.sends[2][3] if v.event.block == "encoder.final_layer_norm"]
    assert encoded and not any(v in cut.sends[1].get(3, ()) for v in encoded)
    assert {(a, b) for a, b in found} <= {(1, 0), (2, 1), (3, 2), (2, 0), (3, 0)}  # gradients


@pytest.mark.parametrize("check", [check_unet, check_t5])
def test_only_what_lives_at_a_cut_is_moved_and_not_through_others(check) -> None:
    check()
