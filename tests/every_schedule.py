"""Every schedule, each for any number of stages: what the laws are tried on."""

from penstock.schedules import ALL_SCHEDULES, Schedule, interleaved_1f1b


def interleaved(num_stages: int, num_microbatches: int) -> Schedule:
    """Give interleaved 1F1B with two or three stages on each rank, or whatever number can be."""
    stages_per_rank = next((v for v in (2, 3) if num_stages % v == 0), num_stages)
    return interleaved_1f1b(stages_per_rank)(num_stages, num_microbatches)


EVERY_SCHEDULE = (*ALL_SCHEDULES, interleaved)
