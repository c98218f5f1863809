"""The check of the kernels' speed."""

import kernels
import pytest
from click.testing import CliRunner


def write(file, **ratios):
    kernels.Recorded("1 x processor", ratios).write(file)
    return kernels.Recorded.read("1 x processor", file)


def test_records_that_are_written_can_be_read(tmp_path):
    file = tmp_path / "ratios.json"
    assert kernels.Recorded.read("1 x processor", file) is None
    assert write(file, encode=[1.234, 2]) == kernels.Recorded(
        "1 x processor", {"encode": [1.23, 2]}
    )
    kernels.Recorded("another", {"encode": [5, 5]}).write(file)
    assert kernels.Recorded.read("1 x processor", file).ratios == {"encode": [1.23, 2]}
    assert kernels.Recorded.read("a third", file) is None


def test_a_kernel_that_takes_twice_as_long_is_named_with_its_ratios(tmp_path):
    record = write(tmp_path / "ratios.json", encode=[2.0, 3.0], decode=[1.0, 2.0])
    assert kernels.slower({"encode": [3.95, 5.8], "decode": [1.9, 3.9]}, record) == {}
    slow = kernels.slower({"encode": [4.06, 6.1], "decode": [1.9, 3.9]}, record)
    assert list(slow) == ["encode"]
    assert (
        "encode: 4.06 times as long as r += g, 6.10 as a product of matrices, and 2.00 times"
        in (slow["encode"])
    )
    assert "when recorded (1 x processor)" in slow["encode"]


def test_a_kernel_slower_relative_to_one_floor_only_is_due_to_the_machine(tmp_path):
    record = write(tmp_path / "ratios.json", encode=[2.0, 3.0])
    for ratios in ([6.0, 3.0], [2.0, 9.0]):
        assert kernels.slower({"encode": ratios}, record) == {}


def test_a_new_kernel_is_named_and_not_checked(tmp_path):
    record = write(tmp_path / "ratios.json", encode=[2.0, 3.0])
    measured = {"encode": [2.0, 3.0], "select": [9.0, 9.0]}
    assert kernels.slower(measured, record) == {}
    (sentence,) = kernels.not_recorded(measured, record)
    assert "select: not recorded yet" in sentence


def test_of_two_measurements_the_lesser_ratios_count():
    first = {"encode": [2.0, 3.0], "decode": [1.0, 1.0]}
    assert kernels.lesser(first, {"encode": [1.5, 4.0]}) == {
        "encode": [1.5, 3.0],
        "decode": [1.0, 1.0],
    }


@pytest.mark.parametrize("label", ["AdaComp encode, bins of 50", "AdaComp decode of 2, bins of 50"])
def test_kernels_are_measured_relative_to_both_floors(monkeypatch, label):
    monkeypatch.setattr(kernels, "ELEMENTS", 100_000)
    measured = kernels.ratios([label])
    assert list(measured) == [label]
    assert all(ratio > 0 for ratio in measured[label])
    assert len(measured[label]) == 2


class Measurements:
    """Replaces `kernels.ratios` by given measurements relative to both floors, one after the
    other."""

    def __init__(self, *measured):
        self._measured = list(measured)
        self.asked = []

    def __call__(self, labels=None):
        self.asked.append(labels and list(labels))
        return {label: [ratio, ratio] for label, ratio in self._measured.pop(0).items()}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Returns check(*measured), which returns the result and the measured kernels."""
    here = kernels.used_processor()
    record = write(tmp_path / "ratios.json", encode=[2.0, 2.0], decode=[1.0, 1.0])

    def run(*measured, known=here):
        measurements = Measurements(*measured)
        monkeypatch.setattr(kernels, "ratios", measurements)
        monkeypatch.setattr(
            kernels.Recorded, "read", lambda name: record if name == known else None
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
    assert "No kernel is far slower than recorded" in result.output


def test_measures_again_what_seems_slow(check):
    result, asked = check({"encode": 6.0, "decode": 1.0}, {"encode": 4.5}, {"encode": 2.2})
    assert result.exit_code == 0
    assert asked == [None, ["encode"], ["encode"]]


def test_fails_where_a_kernel_stays_slow(check):
    slow = [{"decode": 2.5}] * kernels.MORE_TRIES
    result, asked = check({"encode": 2.0, "decode": 2.5}, *slow)
    assert result.exit_code == 1
    assert len(asked) == 1 + kernels.MORE_TRIES
    assert "decode: 2.50 times as long as r += g, 2.50 as a product" in result.output
    assert "encode:" not in result.output


def test_the_check_passes_with_a_notice_without_a_record(check):
    result, asked = check(known="another")
    assert result.exit_code == 0
    assert asked == []
    assert "No speed is recorded for" in result.output
