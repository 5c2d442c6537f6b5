"""The data sets of a recipe: `[data]`."""

from typing import Annotated, Literal

from pydantic import Field

from .section import Above0, Count, File, From0, Mark, Section, Seed, Share, Words


class Digits(Section):
    """The 1,797 handwritten digits that ship with scikit-learn."""

    name: Literal["digits"]
    """digits: 1,797 handwritten digits, which ship with scikit-learn."""
    labels: Literal["digit", "parity", "half"] = "digit"
    """The classes: the digit; odd or even; below 5 or not."""
    size: Annotated[int, Field(ge=8, le=64)] = 8
    """Pixels of each side; the originals have 8, and are enlarged."""
    train_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the training samples to use, to test training with few samples."""
    test_share: Annotated[float, Field(gt=0, lt=1), Mark.HELD_OUT] = 0.2
    """Share of each digit's images that is held out for testing."""
    max_shift: Annotated[int, Field(ge=0, le=8)] = 1
    """Maximal random shift of training images, in pixels, drawn in every epoch."""
    seed: Annotated[Seed, Mark.HELD_OUT] = 0
    """Decides the split into training and test samples."""


class ImageFolder(Section):
    """Images in folders as ImageNet is unpacked: train/CLASS/*.jpg and val/CLASS/*.jpg."""

    name: Literal["image_folder"]
    """image_folder: a folder train with one for each class, and val or test likewise."""
    path: Annotated[File, Mark.EXECUTION]  # it may move; a digest guards its content
    """The folder of the images."""
    size: Annotated[int, Field(ge=8)] = 224
    """Pixels of each side of the network's input."""
    least_area: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Least share of a training image in a random crop; 1: all of it."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a horizontal flip."""
    colour: From0 = 1.0
    """Strength of colour changes, as a multiple of Inception's ranges; 0: none."""
    policy: Literal["none", "randaugment", "autoaugment"] = "none"
    """Further augmentation: random operations, or AutoAugment's ImageNet policy."""
    magnitude: Annotated[int, Field(ge=1, le=29)] = 9
    """Strength of the operations of randaugment."""
    cutout: Share = 0.0
    """Side of a square set to the mean, as a share of the image's side; 0: none."""
    test_share: Annotated[float, Field(gt=0, le=1)] = 0.875
    """Side of the centre crop in evaluation, as a share of the shorter side."""
    test_squeezed: bool = False
    """Crop that share of both sides instead and resize it to a square: with test_share = 1 the
    whole image, as in training with least_area = 1."""
    num_workers: Annotated[int, Field(ge=0), Mark.EXECUTION] = 2
    """Worker processes that decode images; 0: the training process decodes them."""
    strict: bool = False
    """End the run at an image that cannot be decoded; otherwise skip and list it."""


class _Translated(Section):
    """The keys of all parallel text."""

    languages: Words = ()
    """Source languages, such as ["de", "fr"]; none: all of the data."""
    vocabulary_size: Annotated[int, Field(ge=260)] = 64000
    """Subwords of the vocabulary that all languages share."""
    vocabulary: File = ""
    """The vocabulary.json of another run, to start from its weights; empty: train a new one."""
    temperature: Above0 = 5.0
    """Temperature of language sampling: 1 by size, high: uniform.  5 as in later papers on GPipe's
    data, 1.43 as multilingual BERT."""
    tokens_per_step: Count
    """Most tokens of a step, padding included."""
    tokens_per_part: Count
    """Most tokens in memory at once; a step has as many parts as fit."""
    max_length: Count = 256
    """Most tokens of a text that the model takes."""
    too_long: Literal["refuse", "drop"] = "drop"
    """For longer texts: refuse to begin, or leave them out and print their number."""
    beam: Count = 4
    """Width of the beam search at the end of the run; 1 is greedy."""
    length_penalty: From0 = 0.6
    """Preference for longer translations; 0: none."""
    seed: Annotated[Seed, Mark.HELD_OUT] = 0
    """Seed of the held-out samples, the vocabulary's sample and the order of the texts."""


class Names(_Translated):
    """Names of countries, languages, currencies and units in 86 languages, with the English ones.

    They are those of the Unicode CLDR, which ships with Babel.
    """

    name: Literal["names"]
    """names: real names in 86 languages, which ship with Babel."""
    kinds: Words = ("territories", "languages", "currencies", "units")
    """The kinds of names."""
    low_resource: Words = ()
    """Languages that keep low_resource_pairs training pairs only."""
    low_resource_pairs: Count = 50
    """Training pairs of each of those."""
    held_out_share: Annotated[float, Field(gt=0, lt=0.25), Mark.HELD_OUT] = 0.05
    """Held-out share for validation, and again for testing."""


class ParallelText(_Translated):
    """Line-aligned text in files named for their part and languages."""

    name: Literal["parallel_text"]
    """parallel_text: files such as train.de-en.de and train.de-en.en; and valid, and test."""
    path: Annotated[File, Mark.EXECUTION]  # as above
    """The folder of the files."""
    target: str = "en"
    """The target language."""
    held_out_share: Annotated[float, Field(gt=0, lt=0.25), Mark.HELD_OUT] = 0.01
    """Held-out share for validation, and again for testing, if there are no files."""


class Text(Section):
    """Any text file in UTF-8."""

    name: Literal["text"]
    """text: one file in UTF-8."""
    path: Annotated[File, Mark.EXECUTION]  # as above
    """The file."""
    vocabulary_size: Annotated[int, Field(ge=256)] = 256
    """Subwords; 256: the bytes themselves."""
    vocabulary: File = ""
    """The vocabulary.json of another run, to start from its weights; empty: make a new one."""
    length: Count = 256
    """Tokens of a sample."""
    valid_share: Annotated[float, Field(gt=0, lt=1), Mark.HELD_OUT] = 0.05
    """Share at the end of the file that is kept for validation."""
    sample_length: Annotated[int, Field(ge=0)] = 200
    """Tokens that the model writes when the run is finished."""
    sample_temperature: Annotated[float, Field(ge=0.01)] = 0.8
    """Sampling temperature of that text: low values prefer likely tokens."""
    prompt: str = ""
    """The start of that text; empty: the beginning of the validation text."""


ImageSection = Digits | ImageFolder
TranslatedSection = Names | ParallelText
DataSection = ImageSection | TranslatedSection | Text
