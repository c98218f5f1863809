import pytest

from tf_gradcomp.launch.output import LineReader, visible


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain", "plain"),
        ("", ""),
        ("windows\r", "windows"),
        ("1/9\r2/9\r3/9", "3/9"),
        ("3/9\r", "3/9"),
        ("3/9\r\x1b[0m", "3/9"),  # Escape codes alone show nothing.
        ("10%\b\b\b20%", "20%"),
        ("abc\b\bX", "aXc"),
        ("ab\b\b\b\bX", "Xb"),
        ("1/9 ..\b\b\b\b\b\b\r2/9 ..", "2/9 .."),  # As Keras' progress bar does it.
    ],
)
def test_a_redrawn_line_shows_its_last_state(line, shown):
    assert visible(line) == shown


def test_lines_and_characters_may_be_cut_anywhere():
    text = "eins\nzwölf\r\n1/2 ━\b\b\b\b\b\r2/2 ━\nthe end"
    for size in range(1, 12):
        data = text.encode()
        reader = LineReader()
        lines = [
            line for at in range(0, len(data), size) for line in reader.feed(data[at : at + size])
        ]
        assert [*lines, *reader.close()] == ["eins", "zwölf", "2/2 ━", "the end"], size


def test_progress_is_the_state_of_the_open_line():
    reader = LineReader()
    assert (reader.feed(b"Epoch 1"), reader.progress) == ([], "")
    assert (reader.feed(b"\n1/9"), reader.progress) == (["Epoch 1"], "")
    assert (reader.feed(b"\r2/9"), reader.progress) == ([], "2/9")
    assert (reader.feed(b"\r"), reader.progress) == ([], "2/9")
    assert (reader.feed(b"3/9\n"), reader.progress) == (["3/9"], "")
    assert reader.close() == []


def test_an_endless_line_does_not_pile_up():
    reader = LineReader()
    lines = [line for _ in range(100) for line in reader.feed(b"x" * 10_000)]
    assert sum(map(len, lines)) > 900_000


def test_the_old_states_of_a_bar_do_not_pile_up():
    reader = LineReader()
    for _ in range(100):
        assert reader.feed(b"\r" + b"x" * 10_000) == []
    assert len(reader._open) < 30_000


def test_bytes_that_are_no_text_are_marked():
    assert LineReader().feed(b"a\xff\n") == ["a\ufffd"]
