"""All subjects: `SUBJECTS`, in the order in which packages are imported."""

from tests.wild import examples, huggingface, packages, plain
from tests.wild.made import SUBJECTS, Made, Subject, loss_of, pure

__all__ = [
    "SUBJECTS",
    "Made",
    "Subject",
    "examples",
    "huggingface",
    "loss_of",
    "packages",
    "plain",
    "pure",
]
