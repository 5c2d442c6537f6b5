"""Read a recipe from TOML and write it back; each fault is one line with its remedy."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.schedules import ASYNCHRONOUS_NAMES, SCHEDULE_NAMES, pipedream, suits
from penstock_recipes.errors import RecipeError, RunFolderError

from .faults import describe, suggest_place
from .pipeline_section import BESIDE_AUTO
from .recipe import Recipe, marked_keys
from .section import Mark

_SECTIONS = (*Recipe.model_fields,)
FREE_ON_RESUME = marked_keys(Mark.EXECUTION, Mark.LAYOUT, Mark.PROCESSES, Mark.LENGTH)
"""The keys that may change on resume."""


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file; `overrides` are "section.key=value", with values as in TOML.

    A value that is not TOML is a string, so schedule=gpipe needs no quotes.

    Raises:
        RecipeError: the file is missing, unreadable or not TOML, or keys are unknown, missing or
            mistyped; the message lists all of them, one a line.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe {path}; give the path of a .toml file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from None
    changed = [_apply(data, override) for override in overrides]
    _drop_unsuited(data.get("pipeline"), changed)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        faults = [f"{path}: {describe(fault)}" for fault in error.errors(include_url=False)]
        raise RecipeError("\n".join(faults)) from None


def recipe_to_toml(recipe: Recipe) -> str:
    """Return a recipe as TOML for `read_recipe`, with every key, defaults included.

    Keys that plan = "auto" decides are left out.
    """
    sections = []
    for section, keys in recipe.model_dump().items():
        values = {key: value for key, value in keys.items() if value is not None}
        if values.get("plan") == "auto":  # each start plans again, with the same M
            allowed = BESIDE_AUTO - ({"num_microbatches"} - recipe.pipeline.model_fields_set)
            values = {key: value for key, value in values.items() if key in allowed}
        lines = [f"{key} = {_toml_value(value)}" for key, value in values.items()]
        sections.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(sections) + "\n"


def check_resumable(old: Recipe, new: Recipe, *, may_lengthen: bool = True) -> None:
    """Refuse changes that would make a resumed run compute something else.

    The length of the run may change, unless `may_lengthen` is false.

    Raises:
        RecipeError: lists every key that may not change, with both values and the reason.
    """
    before, after = _flat(old.model_dump()), _flat(new.model_dump())
    free = _free_on_resume(before, after)
    if not may_lengthen:
        free -= marked_keys(Mark.LENGTH)
    if old.train.average_checkpoints > 1:  # these keys choose the checkpoints of the mean
        free -= {"train.checkpoint_every", "train.keep_checkpoints"}
    faults = []
    for key in sorted((before.keys() | after.keys()) - free):
        was, would = before.get(key), after.get(key)
        if was == would:
            continue
        reason = "the run would no longer be the same; start a new run"
        if key == "pipeline.num_microbatches":
            reason = (
                "BatchNorm statistics and dropout masks belong to micro-batches, so another M "
                "trains another model; keep it (num_stages may change), or start a new run"
            )
        change = f"{key} was {_toml_value(was)} and cannot become {_toml_value(would)}"
        faults.append(f"{change} on resume: {reason}")
    if faults:
        raise RecipeError("\n".join(faults))


def check_same_run(saved: Mapping[str, Any], recipe: Recipe, checkpoint: Path) -> None:
    """Refuse a checkpoint that was saved with another recipe.

    `saved` is that recipe, read from JSON.  Keys in only one of the two are ignored: another
    version may have added them.

    Raises:
        RunFolderError: names every key that differs, with both values.
    """
    there, here = _flat(saved), _flat(json.loads(json.dumps(recipe.model_dump())))
    keys = sorted((there.keys() & here.keys()) - _free_on_resume(there, here))
    faults = [
        f"{key} is {_toml_value(there[key])} there and {_toml_value(here[key])} here"
        for key in keys
        if there[key] != here[key]
    ]
    if faults:
        raise RunFolderError(
            f"{checkpoint} is of another run: {'; '.join(faults)}. Put it back into its own run "
            "folder, or the recipe that belongs to it into this one"
        )


def _free_on_resume(*recipes: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys that may differ between recipes.

    With an asynchronous schedule, keys that decide the delay of the weights may not.
    """
    schedules = {recipe.get("pipeline.schedule") for recipe in recipes}
    counting = set[str]()
    if schedules & set(ASYNCHRONOUS_NAMES):
        counting = {"pipeline.schedule"}
    if pipedream.__name__ in schedules:
        counting |= {"pipeline.num_stages", "pipeline.partition"}
    return FREE_ON_RESUME - counting


def _drop_unsuited(pipeline: Any, changed: Sequence[str]) -> None:
    """Remove keys of the file that an override of another key makes wrong."""
    if not isinstance(pipeline, dict):
        return
    # Another schedule may need another number of stages on each rank.
    if "pipeline.schedule" in changed and "pipeline.stages_per_rank" not in changed:
        schedule, per_rank = pipeline["schedule"], pipeline.get("stages_per_rank")
        if schedule in SCHEDULE_NAMES and type(per_rank) is int and not suits(schedule, per_rank):
            del pipeline["stages_per_rank"]
    # A stage in one process has no shards.
    is_whole = "pipeline.num_shards" in changed and pipeline["num_shards"] == 1
    if is_whole and "pipeline.sharding" not in changed:
        pipeline.pop("sharding", None)


def _apply(data: dict[str, Any], override: str) -> str:
    """Change one key, and return it as "section.key"."""
    place, equals, text = override.partition("=")
    section, dot, key = place.strip().partition(".")
    try:
        text.encode()
    except UnicodeEncodeError:  # the command line was not UTF-8
        raise RecipeError(
            f"--set {override!a}: the value is no valid Unicode; write it in UTF-8"
        ) from None
    if not equals or not dot or not key:
        hint = suggest_place(section)
        raise RecipeError(
            f"--set {override}: write section.key=value, such as pipeline.num_stages=2"
            + (f"; did you mean {hint}?" if hint else f"; sections are {', '.join(_SECTIONS)}")
        )
    keys = data.setdefault(section, {})
    if isinstance(keys, dict):
        keys[key] = _parse_value(text.strip())
    return f"{section}.{key}"


def _parse_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _toml_value(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, dict):
        pairs = (f"{_toml_value(name)} = {_toml_value(item)}" for name, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    text = json.dumps(value, ensure_ascii=False)  # TOML has no surrogate pairs
    return text.replace("\x7f", "\\u007f")


def _flat(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, keys in sections.items()
        for key, value in keys.items()
    }
