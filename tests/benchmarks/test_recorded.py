"""The check of the kernels' speed."""

import kernels
import pytest
import recorded
from click.testing import CliRunner


def write(file, **ratios):
    recorded.Recorded("1 x processor", ratios).write(file)
    return recorded.Recorded.read("1 x processor", file)


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "ratios.json"
    assert recorded.Recorded.read("1 x processor", file) is None
    assert write(file, encode=1.234) == recorded.Recorded("1 x processor", {"encode": 1.23})
    recorded.Recorded("another", {"encode": 5}).write(file)
    assert recorded.Recorded.read("1 x processor", file).ratios == {"encode": 1.23}
    assert recorded.Recorded.read("a third", file) is None


def test_a_kernel_that_takes_a_third_longer_is_named_with_both_ratios(tmp_path):
    of_record = write(tmp_path / "ratios.json", encode=2.0, decode=1.0)
    assert recorded.slower({"encode": 2.55, "decode": 1.25}, of_record) == {}
    slow = recorded.slower({"encode": 2.66, "decode": 1.25}, of_record)
    assert list(slow) == ["encode"]
    assert "encode: 2.66 times as long as r += g, and 2.00 when recorded (1 x" in slow["encode"]


def test_a_new_kernel_is_named_and_not_checked(tmp_path):
    of_record = write(tmp_path / "ratios.json", encode=2.0)
    measured = {"encode": 2.0, "select": 9.0}
    assert recorded.slower(measured, of_record) == {}
    (sentence,) = recorded.not_recorded(measured, of_record)
    assert "select: not recorded yet" in sentence


class Measurements:
    """In place of `kernels.Ratios`: what is measured, one after the other."""

    def __init__(self, *measured):
        self._measured = list(measured)
        self.asked = []

    def measure(self, labels=None):
        self.asked.append(labels and list(labels))
        return self._measured.pop(0)


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Returns check(*measured), which gives its result and for which kernels it measured."""
    here = kernels.used_processor()
    of_record = write(tmp_path / "ratios.json", encode=2.0, decode=1.0)

    def run(*measured, known=here):
        measurements = Measurements(*measured)
        monkeypatch.setattr(kernels, "Ratios", lambda: measurements)
        monkeypatch.setattr(
            kernels.Recorded, "read", lambda name: of_record if name == known else None
        )
        monkeypatch.setattr(
            kernels.tf.config.threading, "set_intra_op_parallelism_threads", lambda threads: None
        )
        return CliRunner().invoke(kernels.main, ["--check"]), measurements.asked

    return run


def test_passes_where_all_is_as_recorded(check):
    result, asked = check({"encode": 2.1, "decode": 1.0})
    assert result.exit_code == 0
    assert asked == [None]
    assert "are about as fast as recorded" in result.output


def test_measures_again_what_seems_slow(check):
    result, asked = check({"encode": 4.0, "decode": 1.0}, {"encode": 3.0}, {"encode": 2.2})
    assert result.exit_code == 0
    assert asked == [None, ["encode"], ["encode"]]


def test_fails_where_a_kernel_stays_slow(check):
    slow = [{"decode": 1.5}] * kernels.MORE_TRIES
    result, asked = check({"encode": 2.0, "decode": 1.5}, *slow)
    assert result.exit_code == 1
    assert len(asked) == 1 + kernels.MORE_TRIES
    assert "decode: 1.50 times as long as r += g, and 1.00 when recorded" in result.output
    assert "encode:" not in result.output


def test_passes_and_says_so_where_nothing_is_recorded(check):
    result, asked = check(known="another")
    assert result.exit_code == 0
    assert asked == []
    assert "No speed is recorded for" in result.output
