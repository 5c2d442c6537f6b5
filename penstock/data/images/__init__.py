"""Images of a user's own: read from folders or CIFAR's files, augmented, batched, counted."""

from .batches import ImageLoader, ViewedImages, image_batches
from .cifar import load_cifar
from .counting import count_top
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
    "count_top",
    "image_batches",
    "image_folders",
    "load_cifar",
]
