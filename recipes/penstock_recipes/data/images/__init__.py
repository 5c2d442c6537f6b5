"""Images of a user's own: read from folders, augmented, batched."""

from .batches import ImageLoader, ViewedImages
from .folders import ImageSplit, image_folders
from .views import EvaluationView, TrainingView

__all__ = [
    "EvaluationView",
    "ImageLoader",
    "ImageSplit",
    "TrainingView",
    "ViewedImages",
    "image_folders",
]
