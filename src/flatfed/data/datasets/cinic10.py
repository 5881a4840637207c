"""CINIC-10: 270,000 colour images of 32×32 pixels, 10 classes, as PNG files in three equal parts.

`train` is the training set and `test` the test set; `with_validation` adds `valid` to the training set.
"""

from flatfed.data.datasets.base import Labelled, TrainTest, image_set
from flatfed.data.datasets.catalog import DatasetInfo, Folder, archive, register
from flatfed.data.datasets.image_folder import read_class_folders
from flatfed.data.transform import Augmentation

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CINIC10 = DatasetInfo(
    "cinic10",
    "colour images 32×32, 10 classes, 90,000 + 90,000 and 90,000 for validation",
    folders=("CINIC-10",),
    markers=("train/airplane/*.png",),
    downloads=archive(
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
        "md5:6ee4d0c996905fe93221de577967a372",
        687_544_992,
        "train",
        "valid",
        "test",
    ),
)
MEAN, STD = (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)
IMAGES = 90_000  # in each part


@register(CINIC10)
def load_cinic10(
    folder: Folder = None,
    augmentation: Augmentation = "none",
    with_validation: bool = False,
    verify: bool = True,
) -> TrainTest:
    """Load CINIC-10 as uint8 [samples, 3, 32, 32]."""
    located = CINIC10.find(folder)

    def read(part: str) -> Labelled:
        labelled = read_class_folders(located / part, CLASSES, size=(32, 32))
        if verify:
            CINIC10.check_count(located / part, len(labelled.labels), IMAGES)
        return labelled

    train = read("train")
    if with_validation:
        train = Labelled.joined([train, read("valid")])
    return image_set("cinic10", train, read("test"), len(CLASSES), MEAN, STD, augmentation)
