"""Read a user's images from folders, augment and batch them."""

from .batches import ImageLoader, ViewedImages
from .folders import ImageSplit, image_folders, read_image
from .views import EvaluationView, TrainingView

__all__ = [
    "EvaluationView",
    "ImageLoader",
    "ImageSplit",
    "TrainingView",
    "ViewedImages",
    "image_folders",
    "read_image",
]
