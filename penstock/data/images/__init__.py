"""Images of a user's own: read from folders or CIFAR's files, augmented, batched."""

from .batches import ImageLoader, ViewedImages
from .cifar import load_cifar
from .folders import image_folders
from .source import Images, ImageSplit
from .views import EvaluationView, TrainingView

__all__ = [
    "EvaluationView",
    "ImageLoader",
    "ImageSplit",
    "Images",
    "TrainingView",
    "ViewedImages",
    "image_folders",
    "load_cifar",
]
