"""Images in shards: which class a row is of. How they are read and cut is in tests/data/shards and test_decode.py."""

import numpy as np
import pytest

from shoal.core.errors import UserError
from shoal.data.image_shards import count_classes
from shoal.data.section import ImageFolder
from shoal.data.shards.index import ShardIndex
from tests.data.shards.making import picture, write_index


def index_with(classes):
    return ShardIndex("tar", (), {"classes": classes} if classes is not None else {})


@pytest.mark.parametrize(
    ("given", "classes", "found"),
    [(None, ["cat", "dog"], 2), (2, ["cat", "dog"], 2), (7, None, 7), (2, ["0", "1"], 2), (7, ["0", "1"], 7)],
)
def test_the_number_of_classes_is_the_indexs_or_the_users(given, classes, found):
    assert count_classes(given, index_with(classes), None) == found


@pytest.mark.parametrize(("given", "classes"), [(3, ["cat", "dog"]), (1, ["cat", "dog"]), (1, ["0", "1"]), (9, ["1"])])
def test_another_number_than_the_names_is_refused(given, classes):
    with pytest.raises(UserError, match=r"data\.classes: . is not the number of classes in the index, .; leave it out"):
        count_classes(given, index_with(classes), None)


def test_classes_in_parquet_may_be_names(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    from shoal.data.build import build_datasets

    (tmp_path / "train").mkdir()
    rows = [{"image": picture(number), "label": label} for number, label in enumerate(["dog", "cat", "dog"])]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train" / "a.parquet")
    write_index(tmp_path / "train", "parquet", [3], {"classes": ["cat", "dog"]})
    section = ImageFolder(name="image_folder", dir=str(tmp_path), size=16, label="label", augment=False)
    train = build_datasets(section, 0).train
    assert train.batch(np.arange(3), 0)[1].tolist() == [1, 0, 1]
