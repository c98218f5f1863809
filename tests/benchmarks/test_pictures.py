"""The pictures of pages are drawn from the records, and show what the pages say."""

import statistics

import pictures
import pytest
from matplotlib import image, text
from matplotlib.figure import Figure


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a picture; returns its texts."""

    def draw(name):
        texts = []

        def note(figure, path, **options):
            for found in figure.findobj(text.Text):
                texts.append(found.get_text())
            saved(figure, path, **options)

        saved = Figure.savefig
        monkeypatch.setattr(Figure, "savefig", note)
        path = tmp_path / "picture.png"
        pictures.PICTURES[name](path)
        kept = image.imread(pictures.ROOT / name)
        assert kept.shape == image.imread(path).shape
        return "\n".join(texts)

    return draw


def test_the_readme_shows_recorded_steps(drawn):
    shown = drawn("docs/step_time.png")
    for words in ("0.234 s", "0.132 s", "0.033 s, 7 times faster", "0.034 s, 1.9 times faster"):
        assert words in shown
    assert "100 Mbit/s" in shown
    assert "1 Gbit/s" in shown


@pytest.mark.parametrize("name", ["docs/what_is_sent.png", "docs/demo.png"])
def test_the_number_of_fewer_bytes_is_that_of_the_demonstration(drawn, name):
    assert "58 times fewer bytes" in drawn(name)
    sent = {
        method: statistics.mean(pictures.curves_of(method)[0]["sent_bytes"])
        for method in ("no_compression", "adacomp")
    }
    assert sent["no_compression"] == pytest.approx(605_228)
    assert sent["adacomp"] == pytest.approx(10_515, rel=1e-3)


def test_every_other_picture_is_drawn_from_the_records(drawn):
    others = [name for name in pictures.PICTURES if not name.startswith("docs/")]
    assert len(others) > 7
    for name in others:
        assert drawn(name)


def test_seconds_are_where_the_mean_reaches_the_goal(monkeypatch, tmp_path):
    titles = []
    monkeypatch.setattr(Figure, "suptitle", lambda figure, title, **_: titles.append(title))
    seconds = pictures.np.array([1.0, 2.0, 3.0])
    lines = {
        "no_compression": (10 * seconds, pictures.np.array([[50, 80, 91], [60, 90, 91]])),
        "adacomp": (seconds, pictures.np.array([[70, 88, 95], [70, 94, 95]])),
    }
    pictures.metric_over_seconds(lines, 90, "accuracy, %", "some", tmp_path / "times.png")
    (title,) = titles
    assert "after 2.0 s as uncompressed training after 30 s" in title
