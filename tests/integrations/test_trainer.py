"""PenstockTrainer: torch's own loop to the bit, alike in processes and after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import clip_grad_norm_

import penstock
from penstock.errors import ConfigError
from penstock.mesh import Mesh
from tests.distributed.call import call

pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")
transformers = pytest.importorskip("transformers")

NUM_STEPS, NUM_MICROBATCHES, BATCH_SIZE = 4, 4, 8


def make_model(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=32, n_positions=16, use_cache=False,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def make_examples() -> list[dict[str, torch.Tensor]]:
    """Rows with unequal numbers of real tokens."""
    words = torch.randint(
        32, (NUM_STEPS * BATCH_SIZE, 8), generator=torch.Generator().manual_seed(1)
    )
    labels = words.clone()
    for row in range(len(words)):
        labels[row, : row % 7] = -100
    return [{"input_ids": w, "labels": own} for w, own in zip(words, labels, strict=True)]


def as_batch(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


EXAMPLE = {**as_batch(make_examples()[:8]), "num_items_in_batch": torch.tensor(1)}


def make_pipe(dropout: float = 0.0, **options: Any) -> penstock.Pipeline:
    options = {"num_stages": 2, "num_microbatches": NUM_MICROBATCHES, **options}
    return penstock.Pipeline(
        make_model(dropout), example_inputs=EXAMPLE, threads_per_stage=1, **options
    )


def make_trainer(pipe: Any, folder: Path | str, **settings: Any) -> Any:
    from penstock.integrations.transformers import PenstockTrainer

    chosen: dict[str, Any] = {
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": BATCH_SIZE,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "use_cpu": True,
        "optim": "adamw_torch",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        **settings,
    }
    options = {
        name: chosen.pop(name)
        for name in ("compute_metrics", "compute_loss_func")
        if name in chosen
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **chosen)
    return PenstockTrainer(
        pipe,
        arguments,
        train_dataset=make_examples(),
        eval_dataset=make_examples()[:12],
        **options,
    )


def batches_of(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """Return the batches in the order in which the trainer takes them."""
    transformers.set_seed(trainer.args.seed)
    loader = trainer.get_train_dataloader()
    return [dict(batch) for batch in loader]


def train_plainly(trainer: Any) -> dict[str, torch.Tensor]:
    """Train with torch alone, micro-batch after micro-batch, on the trainer's batches."""
    model = make_model().train()
    groups: tuple[list[Any], list[Any]] = ([], [])
    for name, parameter in model.named_parameters():
        groups["bias" in name or "ln_" in name].append(parameter)
    decays = (
        {"params": groups[0], "weight_decay": 0.1},
        {"params": groups[1], "weight_decay": 0.0},
    )
    optimizer = torch.optim.AdamW(decays, lr=1e-2)
    for step, batch in enumerate(batches_of(trainer)):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 1e-2 * (
            1 - step / NUM_STEPS
        )
        count = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
        parts = zip(*(value.chunk(NUM_MICROBATCHES) for value in batch.values()), strict=True)
        for part in parts:
            named = dict(zip(batch, part, strict=True))
            model(**named, num_items_in_batch=count).loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_same(found: Any, expected: Any) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_weights_are_those_of_torchs_own_loop_to_the_bit(tmp_path: Path) -> None:
    pipe = make_pipe()
    trainer = make_trainer(pipe, tmp_path)
    expected = train_plainly(trainer)
    transformers.set_seed(trainer.args.seed)
    trainer.train()
    assert_same(pipe.original.state_dict(), expected)


def in_processes(mesh: Mesh, place: str, resume: bool) -> Any:
    microbatches = NUM_MICROBATCHES // mesh.num_replicas
    pipe = make_pipe(0.1, num_stages=None, mesh=mesh, num_microbatches=microbatches)
    trainer = make_trainer(pipe, place, save_steps=2, save_strategy="steps")
    if mesh.num_replicas > 1:
        with pytest.raises(ConfigError, match="needs the outputs of the whole batch"):
            make_trainer(pipe, place, compute_loss_func=torch.sum)
    trainer.train(resume_from_checkpoint=f"{place}/checkpoint-2" if resume else None)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{place}/trained-{resume}")
    return loss, trainer.state.global_step, trainer.is_world_process_zero()


def twice(mesh: Mesh, place: str) -> list[Any]:
    return [in_processes(mesh, place, resume) for resume in (False, True)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


@pytest.mark.slow
def test_a_resume_has_the_bits_of_the_run_that_went_on(tmp_path: Path) -> None:
    """With dropout, whose random streams go on where they were."""
    whole, resumed = twice(Mesh.of_one_process(2), str(tmp_path))
    assert whole == resumed
    expected = weights(tmp_path / "trained-False")
    assert_same(weights(tmp_path / "trained-True"), expected)
    library = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "trained-True")
    assert_same(library.state_dict(), expected)


@pytest.mark.slow
def test_two_processes_and_a_resume_have_the_bits_of_one_process(tmp_path: Path) -> None:
    alone = in_processes(Mesh.of_one_process(2), str(tmp_path / "one"), False)
    (tmp_path / "two").mkdir()
    by_rank = call(twice, (2, 1), tmp_path, place=str(tmp_path / "two"))
    assert {found[:2] for both in by_rank for found in both} == {alone[:2]}
    assert [first[2] for first, _ in by_rank] == [True, False]
    expected = weights(tmp_path / "one" / "trained-False")
    assert_same(weights(tmp_path / "two" / "trained-False"), expected)
    assert_same(weights(tmp_path / "two" / "trained-True"), expected)


@pytest.mark.slow
def test_replicas_share_a_batch_and_train_as_one_but_for_rounding(tmp_path: Path) -> None:
    alone = in_processes(Mesh.of_one_process(2), str(tmp_path / "one"), False)
    (tmp_path / "four").mkdir()
    place = str(tmp_path / "four")
    found = call(in_processes, (2, 2), tmp_path, place=place, resume=False)
    assert [is_first for *_, is_first in found] == [True, False, False, False]
    assert len({(loss, step) for loss, step, _ in found}) == 1
    assert found[0][:2] == pytest.approx(alone[:2])
    trained = weights(tmp_path / "four" / "trained-False")
    torch.testing.assert_close(trained, weights(tmp_path / "one" / "trained-False"))


def test_evaluation_has_the_loss_and_the_predictions_of_the_model(tmp_path: Path) -> None:
    pipe, seen = make_pipe(), []

    def metrics(predictions: Any) -> dict[str, float]:
        seen.append(predictions)
        return {"count": float(len(predictions.predictions))}

    found = make_trainer(pipe, tmp_path, compute_metrics=metrics).evaluate()
    batch = as_batch(make_examples()[:12])
    with torch.no_grad():
        expected = make_model().eval()(**batch)
    assert found["eval_count"] == 12.0
    torch.testing.assert_close(torch.from_numpy(seen[0].predictions), expected.logits)
    assert (seen[0].label_ids == batch["labels"].numpy()).all()


def test_a_loss_of_the_callers_trains_too(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return outputs.logits.square().sum() / num_items_in_batch

    pipe = penstock.Pipeline(
        make_model(), num_stages=2, num_microbatches=4,
        example_inputs={key: EXAMPLE[key] for key in ("input_ids", "num_items_in_batch")},
    )  # fmt: skip
    trainer = make_trainer(pipe, tmp_path, compute_loss_func=loss)
    before = make_model().state_dict()["transformer.h.0.mlp.c_fc.weight"]
    trainer.train()
    assert not torch.equal(pipe.original.state_dict()["transformer.h.0.mlp.c_fc.weight"], before)


@pytest.mark.slow
def test_bf16_is_autocast_in_every_stage(tmp_path: Path) -> None:
    found = []
    for bf16 in (False, True):
        pipe = make_pipe()
        make_trainer(pipe, tmp_path, bf16=bf16, max_steps=1).train()
        found.append(pipe.original.state_dict()["transformer.h.2.mlp.c_fc.weight"])
    assert found[1].dtype is torch.float32 and not torch.equal(*found)


@pytest.fixture(scope="module")
def pipe() -> penstock.Pipeline:
    """A pipeline that no test trains."""
    return make_pipe()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gradient_accumulation_steps": 2}, "num_microbatches"),
        ({"ddp_find_unused_parameters": False}, "DistributedDataParallel"),
        ({"activation_checkpointing": True}, "recompute"),
        ({"label_smoothing_factor": 0.1}, "compute_loss_func"),
        ({"auto_find_batch_size": True}, "divides the model itself"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(
    pipe: penstock.Pipeline, settings: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        make_trainer(pipe, tmp_path, **settings)


def test_anything_but_a_captured_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="captured pipeline, not a GPT2LMHeadModel"):
        make_trainer(make_model(), tmp_path)


def test_a_pipeline_without_the_count_among_its_inputs_is_refused(tmp_path: Path) -> None:
    example = {key: EXAMPLE[key] for key in ("input_ids", "labels")}
    pipe = penstock.Pipeline(make_model(), num_stages=2, example_inputs=example)
    with pytest.raises(ConfigError, match="num_items_in_batch"):
        make_trainer(pipe, tmp_path)


def test_the_trainer_of_transformers_itself_names_ours(
    pipe: penstock.Pipeline, tmp_path: Path
) -> None:
    settings = transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(ConfigError, match=r"Trainer\(model=pipe\) of .*PenstockTrainer\(pipe"):
        transformers.Trainer(model=pipe, args=settings)
