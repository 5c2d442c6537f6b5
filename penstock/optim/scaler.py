"""Loss scaling for float16: torch's scaler, with one decision for all processes of a mesh."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.runtime.pipeline_module import check_pipeline, parts_of
from penstock.torch_private import AbstractSharedScaler

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline


class GradScaler(AbstractSharedScaler):
    """Keeps small float16 gradients from vanishing: torch.amp.GradScaler for a pipeline.

        scaler = penstock.GradScaler(pipe)
        with torch.autocast("cpu", torch.float16):
            loss = pipe.train_step(inputs, targets, loss_scale=scaler.get_scale())
        scaler.unscale_(optimizer)  # only if something looks at the gradients, such as clipping
        penstock.clip_grad_norm_(pipe, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    If any process finds an inf or a nan in its gradients, all processes skip the step, and all
    scales shrink alike.  In a mesh of processes each makes a scaler, and calls `unscale_`, `step`
    and `update` as all others do, even on a stage without parameters.  The rest is torch's,
    `state_dict` included: plain numbers, equal on every process.

    Args:
        pipe: the pipeline whose gradients are scaled.
        init_scale: as torch's.
        growth_factor: as torch's.
        backoff_factor: as torch's.
        growth_interval: as torch's.
        enabled: as torch's.

    Raises:
        ConfigError: `pipe` is no pipeline, `init_scale` is not above 0, or the schedule updates
            weights while it runs, before any scaler is asked.
        PeerError: by `unscale_` and `step`: another process failed, or is gone.
        MeshError: likewise: another process makes another call, or for another pipeline.
        WaitTimeout: likewise: the others do not come to the same call within the deadline.
    """

    def __init__(
        self,
        pipe: "Pipeline",
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        check_pipeline(pipe)
        if not 0 < init_scale < math.inf:
            raise ConfigError(
                f"init_scale={init_scale!r}; it must be a finite number above 0: losses are "
                "multiplied by it, and gradients divided again"
            )
        if enabled and pipe.plan.schedule.is_asynchronous:
            raise ConfigError(
                f"schedule={pipe.plan.schedule!r} updates weights while it runs: whether a "
                "gradient of any stage has overflowed is not known before the first of them "
                "updates. Use bfloat16, which needs no loss scale, or a synchronous schedule"
            )
        self._place = pipe.devices[0]
        super().__init__(
            self._place.type, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._mesh, self._number = pipe.mesh, parts_of(pipe).number
        # Torch makes the scale's tensor at the first call; `unscale_` needs it before that.
        self.scale(torch.zeros((), device=self._place))

    def share(
        self, look: Callable[[], dict[torch.device, Tensor]], found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        """Look for inf and nan as torch does; then share the result with all processes."""
        world = self._mesh.world
        with world.reporting():
            infs = look()
            if world.size == 1:
                return infs or {found_inf.device: found_inf}  # torch needs at least one
            mine = float(any(infs.values()))
            rows = world.exchange("GradScaler", self._number, (mine,))
        return {found_inf.device: found_inf.fill_(max(anywhere for (anywhere,) in rows))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.scale(torch.zeros((), device=self._place))
