"""`save_adapter`: the adapters of a pipeline, as PEFT saves them."""

import os
from typing import Any

import torch.distributed as dist

import penstock
from penstock.errors import ConfigError
from penstock.runtime.pipeline_module import parts_of


def save_adapter(folder: str | os.PathLike[str], pipe: "penstock.Pipeline") -> None:
    """Save the adapters of a captured PeftModel, so that `PeftModel.from_pretrained` loads them.

    In processes all of them call this alike; rank 0 gathers the adapters, and writes.

    Raises:
        ConfigError: the pipeline's model is no PeftModel.
    """
    model: Any = pipe.original
    if not hasattr(model, "peft_config"):
        raise ConfigError(
            f"{type(model).__name__} has no adapters; capture peft.get_peft_model(model, config), "
            "or use penstock.save_pretrained(folder, pipe)"
        )
    whole = parts_of(pipe).held.state()
    here = {name: whole[name].cpu() for name, p in pipe.named_parameters() if p.requires_grad}
    parts = [here]
    if pipe.mesh.world_size > 1:
        parts = [{} for _ in range(pipe.mesh.world_size)] if pipe.mesh.is_first_rank else []
        dist.gather_object(here, parts or None)
    if pipe.mesh.is_first_rank:
        model.save_pretrained(folder, state_dict={n: v for part in parts for n, v in part.items()})
    if pipe.mesh.world_size > 1:
        dist.barrier()
