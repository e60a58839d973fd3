import os

from shoal.launch.lines import Lines


def lines_of(*chunks: bytes, longest: int | None = None) -> list[list[str]]:
    """What is read after each chunk was written, and what is left at the end."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    lines = Lines(reader, longest)
    found = []
    for chunk in chunks:
        os.write(writer, chunk)
        found.append(lines.read())
    os.close(writer)
    assert lines.is_open
    assert lines.read() == [] and not lines.is_open
    found.append(lines.rest())
    os.close(reader)
    return found


def test_lines_come_when_they_are_whole_and_the_rest_at_the_end() -> None:
    assert lines_of(b"one\ntw", b"o\n\nthree") == [["one"], ["two", ""], ["three"]]
    assert lines_of(b"one\n") == [["one"], []]


def test_reading_does_not_wait() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    lines = Lines(reader)
    assert lines.read() == [] and lines.is_open
    os.close(writer)
    os.close(reader)


def test_long_lines_are_cut_whether_they_come_at_once_or_in_pieces() -> None:
    assert lines_of(b"x" * 50 + b"\nshort\n", longest=10) == [["x" * 10, "short"], []]
    assert lines_of(b"abcdef", b"ghijkl", b"mnop\nnext\n", longest=10) == [[], [], ["abcdefghij", "next"], []]
    assert lines_of(b"y" * 30, longest=10) == [[], ["y" * 10]]
    assert lines_of(b"z" * 300 + b"\n") == [["z" * 300], []]


def test_a_progress_bar_is_shown_as_it_ended() -> None:
    assert lines_of(b"\r 10%", b"\r 20%", b"\r100%\ndone\r\n", longest=100) == [[], [], ["100%", "done"], []]
    assert lines_of(*[b"\r%3d%%" % percent for percent in range(101)], longest=10)[-1] == ["100%"]


def test_bytes_that_are_not_text_do_not_stop_it() -> None:
    assert lines_of(b"\xff\xfe\n\xc3", b"\xa4\n") == [["\ufffd\ufffd"], ["ä"], []]
