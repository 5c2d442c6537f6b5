"""A folder of safetensors is loaded and saved as Hugging Face's own libraries do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import penstock
from penstock.checkpoint.pretrained.folder import INDEX, MODEL
from penstock.errors import CheckpointError, ConfigError
from tests.model.capture.any_models.made import words
from tests.model.capture.any_models.required import OF_TRANSFORMERS
from tests.model.capture.running import assert_equal
from tests.model_parts import Noted, noted_pipeline
from tests.pretrained import BATCH, build, logits_of, pipeline, saved_by_transformers, whole_logits

FEW = ["gpt2", "llama, tied", "t5"]
LIBRARY = [model.name for model in OF_TRANSFORMERS]
FOLDERS = ("ours", "theirs")
SHARDS = {"max_shard_size": "20KB"}
NAMES = [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in LIBRARY]


def own(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict())


@pytest.fixture(scope="module")
def gpt2() -> penstock.Pipeline:
    """A pipeline that refuses all that its tests want to load."""
    return pipeline(build("gpt2"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in FEW[::2]),  # one file
        *((name, SHARDS) for name in FEW[1::2]),
        *(pytest.param(*name.values, SHARDS, marks=name.marks) for name in NAMES if name.marks),
    ],
)
def test_what_transformers_saved_is_loaded(name, options, tmp_path) -> None:
    whole: Any = build(name)[0]
    whole.save_pretrained(tmp_path / "m", **options)
    assert (tmp_path / "m" / INDEX).exists() == bool(options)
    pipe = pipeline(build(name, device="meta"), weights=tmp_path / "m")
    assert_equal(own(pipe.original), own(whole))
    assert_equal(dict(pipe.original.named_buffers()), dict(whole.named_buffers()))
    inputs = build(name)[1](BATCH)
    if name in FEW:
        assert torch.equal(logits_of(pipe.eval_step(inputs)), whole_logits(whole, inputs))


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_what_was_saved(name: str, tmp_path: Path) -> None:
    pipe = pipeline(build(name), 3)
    penstock.save_pretrained(tmp_path / "m", pipe, max_shard_bytes=20_000)
    kind: Any = type(pipe.original)
    again, report = kind.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(report.values()), report
    assert_equal(own(again), own(pipe.original))
    assert again.config.architectures == [kind.__name__]
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    files = {file.name for file in (tmp_path / "m").glob("*.safetensors")}
    assert files == set(index["weight_map"].values())
    held = {n: t for file in files for n, t in load_file(tmp_path / "m" / file).items()}
    assert held.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in held.values())


@pytest.mark.parametrize("name", NAMES)
def test_files_are_those_that_transformers_writes(name: str, tmp_path: Path) -> None:
    saved_by_transformers(name, tmp_path / "theirs")
    penstock.save_pretrained(tmp_path / "ours", pipeline(build(name), 3))
    ours, theirs = ({file.name: file for file in (tmp_path / f).iterdir()} for f in FOLDERS)
    assert ours.keys() == theirs.keys()
    assert_equal(load_file(ours.pop(MODEL)), load_file(theirs.pop(MODEL)))
    for file, path in ours.items():
        assert json.loads(path.read_text()) == json.loads(theirs[file].read_text()), file


def test_a_folder_of_the_base_model_is_loaded_and_one_of_a_larger_model(tmp_path: Path) -> None:
    whole: Any = build("gpt2")[0]
    whole.transformer.save_pretrained(tmp_path / "base")  # without "transformer."
    assert "h.0.ln_1.weight" in load_file(tmp_path / "base" / MODEL)
    pipe = pipeline(build("gpt2", device="meta"), weights=tmp_path / "base")
    assert_equal(own(pipe.original), own(whole))  # the head is tied
    whole.save_pretrained(tmp_path / "whole")
    with torch.device("meta"):
        base = transformers.GPT2Model(whole.config)
    pipe = pipeline((base, build("gpt2")[1]), weights=tmp_path / "whole")
    assert_equal(own(pipe.original), own(whole.transformer))


def test_a_tied_parameter_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    whole = saved_by_transformers("llama, tied", tmp_path / "m")
    content = load_file(tmp_path / "m" / MODEL)
    content["lm_head.weight"] = content.pop("model.embed_tokens.weight")
    save_file(content, tmp_path / "m" / MODEL)
    pipe = pipeline(build("llama, tied", device="meta"), weights=tmp_path / "m")
    assert_equal(own(pipe.original), own(whole))
    content["model.embed_tokens.weight"] = content["lm_head.weight"] + 1
    save_file(content, tmp_path / "m" / MODEL)
    with pytest.raises(CheckpointError, match=r"lm_head.weight differ, and are one tensor"):
        penstock.load_pretrained(tmp_path / "m", pipe)


def test_values_take_the_parameters_dtype(tmp_path: Path) -> None:
    whole = build("gpt2")[0].to(torch.bfloat16)
    whole.save_pretrained(tmp_path / "m")  # type: ignore[operator]  # of transformers
    pipe = pipeline(build("gpt2", device="meta"), weights=tmp_path / "m")
    expected = {name: tensor.float() for name, tensor in own(whole).items()}
    assert_equal(own(pipe.original), expected)
    penstock.save_pretrained(tmp_path / "again", pipe)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    "dtype, kind",
    [(torch.float8_e4m3fn, "packed"), (torch.uint8, "packed"), (torch.int8, "whole")],
)
def test_quantized_values_are_refused(
    gpt2: penstock.Pipeline, dtype: torch.dtype, kind: str, tmp_path: Path
) -> None:
    saved_by_transformers("gpt2", tmp_path / "m")
    content = load_file(tmp_path / "m" / MODEL)
    name = "transformer.h.0.mlp.c_fc.weight"
    content[name] = content[name].to(dtype)
    save_file(content, tmp_path / "m" / MODEL)
    with pytest.raises(CheckpointError, match=f"{name} holds {kind} numbers .* quantized model"):
        penstock.load_pretrained(tmp_path / "m", gpt2)


def test_unknown_tensors_are_told_and_missing_or_misshapen_ones_refused(tmp_path: Path) -> None:
    saved_by_transformers("gpt2", tmp_path / "m")
    content = load_file(tmp_path / "m" / MODEL)
    content["other.weight"] = torch.zeros(2)
    save_file(content, tmp_path / "m" / MODEL)
    pipe = pipeline(build("gpt2"))
    assert penstock.load_pretrained(tmp_path / "m", pipe) == ("other.weight",)
    with pytest.warns(UserWarning, match=r"no place in the model: other\.weight"):
        pipeline(build("gpt2", device="meta"), weights=tmp_path / "m")
    del content["transformer.ln_f.bias"], content["transformer.h.3.ln_1.weight"]
    content["transformer.wpe.weight"] = torch.zeros(7, 32)
    content["transformer.h.0.ln_1.weight"] += 1
    save_file(content, tmp_path / "m" / MODEL)
    before = {name: tensor.clone() for name, tensor in own(pipe.original).items()}
    with pytest.raises(CheckpointError) as caught:
        penstock.load_pretrained(tmp_path / "m", pipe)
    for text in (
        "transformer.ln_f.bias is missing",
        "transformer.h.3.ln_1.weight is missing",
        "transformer.wpe.weight has the shape [7, 32], the model's",
        "1 tensors there have no place in the model: other.weight",
    ):
        assert text in str(caught.value)
    assert_equal(own(pipe.original), before)


def test_parts_of_a_fused_tensor_are_put_together_or_named(tmp_path: Path) -> None:
    whole = saved_by_transformers("mixtral", tmp_path / "m")  # each expert's weights apart
    content = load_file(tmp_path / "m" / MODEL)
    part = "model.layers.2.block_sparse_moe.experts.1.w1.weight"
    assert part in content
    pipe = pipeline(build("mixtral", device="meta"), weights=tmp_path / "m")
    assert_equal(own(pipe.original), own(whole))
    content[part] = content[part][1:]
    save_file(content, tmp_path / "m" / MODEL)
    fused = r"model\.layers\.2\.mlp\.experts\.gate_up_proj cannot be made of .*experts\.0\.w1"
    with pytest.raises(CheckpointError, match=fused):
        penstock.load_pretrained(tmp_path / "m", pipe)


def test_what_the_class_leaves_out_of_files_is_computed(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"layers": 2, "attention_heads": 2, "ffn_dim": 24}
    sizes = {f"{part}_{n}": size for part in ("encoder", "decoder") for n, size in sizes.items()}
    sizes |= {"vocab_size": 61, "d_model": 16, "max_position_embeddings": 16}
    tokens: dict[str, Any] = {"pad_token_id": 60, "decoder_start_token_id": 60, "use_cache": False}
    config: Any = transformers.MarianConfig(**sizes, **tokens)
    inputs = {"input_ids": words(BATCH), "decoder_input_ids": words(BATCH)}
    whole: Any = transformers.MarianMTModel(config)
    whole.save_pretrained(tmp_path / "m")
    content = load_file(tmp_path / "m" / MODEL)
    left_out = {f"model.{part}.embed_positions.weight" for part in ("encoder", "decoder")}
    assert not content.keys() & left_out
    with torch.device("meta"):
        model = transformers.MarianMTModel(config)
    pipe = pipeline((model, lambda _: inputs), weights=tmp_path / "m")
    assert_equal(own(pipe.original), own(whole))
    penstock.save_pretrained(tmp_path / "again", pipe)
    assert_equal(load_file(tmp_path / "again" / MODEL), content)


def test_folders_that_are_none_are_refused(gpt2: penstock.Pipeline, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        penstock.load_pretrained(tmp_path / "nowhere", gpt2)
    with pytest.raises(CheckpointError, match="but nothing; give the folder of a model"):
        penstock.load_pretrained(tmp_path, gpt2)
    for file, content, said in (
        ("pytorch_model.bin", b"never read", r"never unpickles .* convert it once"),
        (MODEL, b"no tensors", "is damaged"),
        (INDEX, b"[]", "is no index of tensors"),
    ):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(CheckpointError, match=said):
            penstock.load_pretrained(tmp_path, gpt2)


def test_an_index_that_does_not_fit_its_files_is_refused(
    gpt2: penstock.Pipeline, tmp_path: Path
) -> None:
    saved_by_transformers("gpt2", tmp_path / "m", max_shard_size="20KB")
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    file = index["weight_map"]["transformer.ln_f.bias"]
    held = load_file(tmp_path / "m" / file)
    save_file({n: t for n, t in held.items() if n != "transformer.ln_f.bias"}, tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / "m" / file)
    with pytest.raises(CheckpointError, match=r"does not hold transformer\.ln_f\.bias"):
        penstock.load_pretrained(tmp_path / "m", gpt2)
    (tmp_path / "m" / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file} is not there"):
        penstock.load_pretrained(tmp_path / "m", gpt2)


@pytest.mark.parametrize("file", ("../outside.safetensors", "/outside.safetensors", "a/../../b"))
def test_an_index_that_leaves_its_folder_is_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"weight": file}}))
    with pytest.raises(CheckpointError, match=r"names the file .* outside of the folder"):
        penstock.load_pretrained(
            tmp_path, penstock.Pipeline([nn.Linear(1, 1)], num_stages=1, num_microbatches=1)
        )


def test_files_of_a_folder_may_be_links_as_in_a_cache(tmp_path: Path) -> None:
    model, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    blob, folder = tmp_path / "blobs" / "0f3a", tmp_path / "snapshots" / "main"
    blob.parent.mkdir()
    folder.mkdir(parents=True)
    save_file({"0.weight": model.weight.detach(), "0.bias": model.bias.detach()}, blob)
    (folder / "model-1.safetensors").symlink_to(blob)
    index = {"weight_map": dict.fromkeys(("0.weight", "0.bias"), "model-1.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    penstock.load_pretrained(folder, penstock.Pipeline([twin], num_stages=1, num_microbatches=1))
    assert torch.equal(model.weight, twin.weight)


def test_nothing_is_overwritten_and_nothing_is_left_of_a_failure(tmp_path, monkeypatch) -> None:
    pipe = pipeline(build("gpt2"))
    (tmp_path / "empty").mkdir()
    penstock.save_pretrained(tmp_path / "empty", pipe)
    with pytest.raises(CheckpointError, match="never overwritten"):
        penstock.save_pretrained(tmp_path / "empty", pipe)
    with pytest.raises(ConfigError, match="max_shard_bytes=0"):
        penstock.save_pretrained(tmp_path / "m", pipe, max_shard_bytes=0)

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("penstock.checkpoint.pretrained.save.save_file", full)
    with pytest.raises(CheckpointError, match=r"no space left; nothing is left of it"):
        penstock.save_pretrained(tmp_path / "m", pipe)
    assert [file.name for file in tmp_path.iterdir()] == ["empty"]


class Chain(nn.Sequential):
    """Layers in a row, with BatchNorm, and a buffer that no file holds."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), Shifted(), nn.Linear(8, 2))


class Shifted(nn.Module):
    """Adds a fixed number to each feature; has a weight that nothing draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))
        self.shift: Tensor
        self.register_buffer("shift", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.shift.copy_(torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift


def test_layers_in_a_row_are_saved_and_loaded_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    chain = Chain()
    nn.init.ones_(chain.get_parameter("2.weight"))
    pipe = penstock.Pipeline(chain, 2, threads_per_stage=1, num_microbatches=1)
    chain(torch.rand(4, 4))  # moves the statistics
    penstock.save_pretrained(tmp_path / "m", pipe)
    assert [file.name for file in (tmp_path / "m").iterdir()] == [MODEL]
    assert "2.shift" not in load_file(tmp_path / "m" / MODEL)
    with torch.device("meta"):
        twin = Chain()
    pipe = penstock.Pipeline(
        twin, 2, threads_per_stage=1, weights=tmp_path / "m", num_microbatches=1
    )
    assert_equal(own(twin), own(chain))
    x = torch.rand(4, 4)
    assert torch.equal(pipe.eval_step(x), chain.eval()(x))


@pytest.mark.parametrize("at_once", [True, False], ids=["weights=", "load_pretrained"])
def test_extra_state_is_saved_and_loaded_too(at_once: bool, tmp_path: Path) -> None:
    model, twin = Noted({"seen": [1, 2]}, torch.arange(3), "of all"), Noted()
    penstock.save_pretrained(tmp_path / "m", noted_pipeline(model), max_shard_bytes=20)
    pipe = noted_pipeline(twin, **({"weights": tmp_path / "m"} if at_once else {}))
    if not at_once:
        assert penstock.load_pretrained(tmp_path / "m", pipe) == ()
    assert (twin.first.note, twin.note) == ({"seen": [1, 2]}, "of all")
    assert torch.equal(twin.second.note, torch.arange(3))
    assert len(twin.first.given) == len(twin.second.given) == 1


def test_transformers_ignores_extra_state_that_is_no_tensor(tmp_path: Path) -> None:
    class Counting(nn.Dropout):
        seen = 0

        def get_extra_state(self) -> int:
            return self.seen

        def set_extra_state(self, state: int) -> None:
            self.seen = state

    made = build("gpt2")
    model: Any = made[0]
    model.transformer.drop = Counting(0.0)
    model.transformer.drop.seen = 7
    pipe = pipeline(made)
    penstock.save_pretrained(tmp_path / "m", pipe)
    model.transformer.drop.seen = 0
    penstock.load_pretrained(tmp_path / "m", pipe)
    assert model.transformer.drop.seen == 7
    _, report = type(model).from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(report.values()), report
    unlike = pipeline(build("gpt2"))
    assert penstock.load_pretrained(tmp_path / "m", unlike) == ("transformer.drop._extra_state",)
    saved_by_transformers("gpt2", tmp_path / "without")
    with pytest.raises(CheckpointError, match=r"transformer\.drop\._extra_state is missing"):
        penstock.load_pretrained(tmp_path / "without", pipe)


@pytest.mark.parametrize("content", ["[1]", "{", ""])
def test_damaged_extra_state_is_refused(
    gpt2: penstock.Pipeline, content: str, tmp_path: Path
) -> None:
    saved_by_transformers("gpt2", tmp_path / "m")
    (tmp_path / "m" / "extra_state.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"extra_state\.json is damaged"):
        penstock.load_pretrained(tmp_path / "m", gpt2)
