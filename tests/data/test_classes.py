"""Which class a row is of."""

import pytest

from shoal.core.errors import UserError
from shoal.data.classes import find_classes, label_column
from shoal.data.shards.index import ShardIndex
from shoal.data.shards.opened import RowError


def classes_of(names, *, form="jsonl", label=None, val=None, column=None, count=None):
    about = {"classes": names} if names is not None else {}
    about |= {"label": label} if label is not None else {}
    index_of_val = ShardIndex(form, (), {"classes": val} if val else {}) if val is not None else None
    train = ShardIndex(form, (), about)
    return find_classes(label_column(column, train, "label"), train, index_of_val, count)


@pytest.mark.parametrize(
    ("count", "names", "found"),
    [(None, ["cat", "dog"], 2), (2, ["cat", "dog"], 2), (7, None, 7), (2, ["0", "1"], 2), (7, ["0", "1"], 7)],
)
def test_their_number_is_the_indexs_or_the_users(count, names, found):
    assert classes_of(names, count=count).count == found


@pytest.mark.parametrize(("count", "names"), [(3, ["cat", "dog"]), (1, ["cat", "dog"]), (1, ["0", "1"]), (9, ["1"])])
def test_another_number_than_the_names_is_refused(count, names):
    with pytest.raises(UserError, match=r"data\.classes: . is not the number of classes in the index, .; leave it out"):
        classes_of(names, count=count)


@pytest.mark.parametrize(
    ("settings", "value", "number"),
    [
        ({"names": ["cat", "dog"], "label": "label"}, "dog", 1),
        ({"names": ["cat", "dog"]}, "dog", 1),
        ({"names": ["cat", "dog"]}, 1, 1),  # as Hugging Face has them
        ({"names": ["0", "1"], "label": "label"}, "1", 1),
        ({"names": ["0", "1"], "label": "label", "count": 9}, 8, 8),
        ({"names": ["1", "2"], "label": "label"}, 1, 0),
        ({"names": ["False", "True"], "label": "label"}, True, 1),
        ({"names": ["1", "2"], "form": "tar"}, b"1", 1),  # folders with such names; a tar has their numbers
        ({"names": None, "count": 3}, "2", 2),
    ],
)
def test_names_and_numbers(settings, value, number):
    assert classes_of(**settings).of({"label": value}) == number


@pytest.mark.parametrize(
    ("settings", "value", "told"),
    [
        ({"names": ["01", "02"], "label": "label"}, "1", "is '1'; the classes are 01, 02"),  # not the second one
        ({"names": ["cat", "dog"], "label": "label"}, 1, "is 1; the classes are cat, dog"),
        ({"names": ["cat", "dog"], "label": "label"}, "cow", "is 'cow'; the classes are cat, dog"),
        ({"names": None, "count": 3}, 3, "is 3; the classes are numbers from 0 to 2"),
        ({"names": None, "count": 3}, -1, "is -1; the classes"),
        ({"names": None, "count": 3}, "x" * 99, r"x\.\.\.; the classes"),
        ({"names": None, "count": 3}, None, "has no column label"),
    ],
)
def test_what_is_no_class(settings, value, told):
    with pytest.raises(RowError, match=told):
        classes_of(**settings).of({"label": value, "text": "hello"})


def test_the_classes_of_a_column_are_those_of_no_other():
    assert classes_of(["art", "sport"], label="topic").column == "topic"
    stars = classes_of(["art", "sport"], label="topic", column="stars", count=5)
    assert stars.of({"stars": 4, "topic": "art"}) == 4
    with pytest.raises(UserError, match=r"data\.classes: is required, .* names no classes of column stars"):
        classes_of(["art", "sport"], label="topic", column="stars")


def test_other_classes_in_validation_are_refused():
    with pytest.raises(UserError, match="the shards in val have other classes"):
        classes_of(["a", "b"], val=["a", "c"])
