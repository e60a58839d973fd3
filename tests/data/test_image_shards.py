"""Images in shards: which class a row is of. How they are read and cut is in tests/data/shards and test_decode.py."""

import numpy as np
import pytest

from shoal.core.errors import UserError
from shoal.data.section import ImageFolder
from tests.data.shards.making import picture, write_index


def test_classes_in_parquet_may_be_names(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    from shoal.data.build import build_datasets

    (tmp_path / "train").mkdir()
    rows = [{"image": picture(number), "label": label} for number, label in enumerate(["dog", "cat", "dog"])]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train" / "a.parquet")
    write_index(tmp_path / "train", "parquet", [3], {"classes": ["cat", "dog"]})
    section = ImageFolder(name="image_folder", dir=str(tmp_path), size=16, augment=False)
    train = build_datasets(section, 0).train
    assert train.batch(np.arange(3), 0)[1].tolist() == [1, 0, 1]


@pytest.mark.parametrize(("field", "told"), [("label", "lable"), ("image", "picture")])
def test_a_wrong_column_is_told_before_training(tmp_path, field, told):
    from shoal.data.build import build_datasets

    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.parquet").write_bytes(b"x")
    about = {"classes": ["cat", "dog"], "columns": ["image", "label"]}
    write_index(tmp_path / "train", "parquet", [3], about)
    section = ImageFolder(name="image_folder", dir=str(tmp_path), **{field: told})
    with pytest.raises(UserError, match=f"^data.{field}: .*a.parquet: has no column '{told}'; it has: image, label"):
        build_datasets(section, 0)
