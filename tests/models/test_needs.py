import pytest

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.models.needs import describe_data, divisors, image_classes, running_text, text_classes

IMAGES = DataSpec(image_shape=(3, 32, 32), num_classes=10)
NEWS = DataSpec(vocab_size=30_000, num_classes=4)
BOOK = DataSpec(vocab_size=65, context=256)


def test_what_fits_is_handed_over():
    assert image_classes("vit", IMAGES) == ((3, 32, 32), 10)
    assert text_classes("lstm", NEWS) == (30_000, 4)
    assert running_text("gpt", BOOK) == (65, 256)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (IMAGES, "images of 3x32x32 in 10 classes"),
        (NEWS, "text in 4 classes"),
        (BOOK, "running text in contexts of 256 tokens"),
        (DataSpec(), "neither images nor text"),
    ],
)
def test_data_in_words(spec, words):
    assert describe_data(spec) == words


@pytest.mark.parametrize(
    ("need", "spec", "ending"),
    [
        (image_classes, NEWS, "needs images, but the data gives text in 4 classes; for this data: lstm, bilstm or"),
        (text_classes, BOOK, "but the data gives running text in contexts of 256 tokens; for this data: gpt or"),
        (running_text, IMAGES, "for this data: mlp, simple_cnn, resnet18, resnet34, resnet50, resnet101, vit or"),
        (image_classes, DataSpec(), "needs images, but the data gives neither images nor text; for this data:"),
        (image_classes, DataSpec(image_shape=(1, 8, 8)), "needs classes, but the data gives images of 1x8x8;"),
    ],
)
def test_what_does_not_fit_is_told_with_what_would(need, spec, ending):
    with pytest.raises(UserError) as caught:
        need("this", spec)
    message = str(caught.value)
    assert message.startswith("model.name: this needs ")
    assert ending in message
    assert message.endswith(" your own module:function")


def test_divisors():
    assert divisors(12) == "1, 2, 3, 4, 6, 12"
    assert divisors(1) == "1"
