"""The claims of papers whose runs are those of the table of all methods, on digits."""

from __future__ import annotations

from methods_table import ALTERNATING, run_of

from claims.claim import (
    DENSE,
    FAIR,
    IMAGE,
    POINT,
    Claim,
    Outcome,
    Paper,
    Record,
    Results,
    accuracies,
    all_hold,
    behind_or_ahead,
    compressed,
    mean_behind,
    ratio,
    within,
)

SIDCO_DENSITY = 0.001  # the default
ESTIMATED = 1024  # elements of the smallest variable whose threshold SIDCo estimates
ENTRY_BYTES = 8
SIDCO = run_of("digits", 8, "sidco")
MAX_NORM = run_of("digits", 2, "max_norm")
ARC_TOP_K = run_of("digits", 8, "arc_top_k")
TIMES = 40
DENSITY = 0.0014  # of the sketch, so that the ratio is just above that


def _arc_top_k(results: Results) -> Outcome:
    gap = mean_behind(results, "ARC-Top-K", "top-k")
    return Outcome(
        within(gap),
        accuracies(results, "top-k", "ARC-Top-K"),
        f"ARC-Top-K is {behind_or_ahead(gap)} top-k. Required: at most {POINT:g} point behind.",
    )


def _sidco(results: Results) -> Outcome:
    gap = mean_behind(results, "SIDCo", "top-k")
    bytes_ratio = ratio(results, "top-k") / ratio(results, "SIDCo")
    shares = [ratio(results, label, _density) / SIDCO_DENSITY for label in ("SIDCo", "SIDCo, LSTM")]
    low, high = 0.75, 1.25
    return Outcome(
        all_hold(within(gap), *(low <= share <= high for share in (bytes_ratio, *shares))),
        accuracies(results, "top-k", "SIDCo"),
        f"SIDCo is {behind_or_ahead(gap)} top-k, with {bytes_ratio:.2f} times the bytes. In "
        f"variables with at least {ESTIMATED:,} elements, it sends {shares[0]:.2f} times the "
        f"wanted number of entries in the digits network, and {shares[1]:.2f} times in the LSTM, "
        f"in the second half of the runs. Required: at most {POINT:g} point behind, and {low} to "
        f"{high} times "
        "the bytes and the entries.",
    )


def _density(record: Record) -> float:
    """Returns the sent share of entries, in large variables and the second half of the run."""
    traffic = record["traffic"]
    large = {
        path: variable["elements"]
        for path, variable in traffic["variables"].items()
        if variable["elements"] >= ESTIMATED
    }
    counts = (traffic["tensor_bytes"][path] / traffic["exchanges"] - 4 for path in large)
    return sum(counts) / ENTRY_BYTES / sum(large.values())


def _sketch(results: Results) -> Outcome:
    gap, fewer = mean_behind(results, "sketch"), ratio(results, "sketch")
    level = within(gap)
    if level:
        holds: bool | None = fewer >= TIMES
    else:
        holds = level if fewer <= FAIR * TIMES else None
    return Outcome(
        holds,
        {"fewer bytes": f"{fewer:.0f} times", **accuracies(results, DENSE, "sketch")},
        f"The sketch is {behind_or_ahead(gap)} uncompressed training. Required: at most {POINT:g} "
        f"point "
        f"behind at the paper's ratio of {TIMES}. A failure at a ratio above {FAIR * TIMES:.0f} "
        "decides nothing.",
    )


def _halved(results: Results) -> Outcome:
    gap = mean_behind(results, "alternating", "both factors")
    fewer = ratio(results, "alternating") / ratio(results, "both factors")
    return Outcome(
        all_hold(fewer >= 1.8, within(gap)),
        {"fewer bytes": f"{fewer:.2f} times", **accuracies(results, "both factors", "alternating")},
        f"PowerSGD with alternating factors is {behind_or_ahead(gap)} PowerSGD with both factors. "
        f"Required: at least 1.8 times fewer bytes, and at most {POINT:g} point behind.",
    )


def _bits(results: Results) -> Outcome:
    four, two = (mean_behind(results, label) for label in ("4 bits", "2 bits"))
    return Outcome(
        all_hold(within(four), two - four > IMAGE),
        {"behind with 4 bits": f"{four:.1f} points", "with 2 bits": f"{two:.1f} points"},
        f"Required: 4 bits are at most {POINT:g} point behind uncompressed training, and 2 bits "
        f"are more "
        "than an image behind 4 bits.",
    )


PAPERS = (
    Paper(
        "SIDCo",
        "Abdelmoniem et al., MLSys 2021, [arXiv 2101.10761](https://arxiv.org/abs/2101.10761)",
        [
            Claim(
                "sidco/threshold",
                "With the estimated threshold, about as many entries are sent as by top-k, and "
                "training is as accurate.",
                checked=True,
                ran="The digits network, Adam, 8 workers, 440 steps, a density of 0.001; and "
                "the number of entries also in the character LSTM with 2 workers.",
                runs={
                    "SIDCo": SIDCO,
                    "top-k": compressed(SIDCO, 8, f"top_k(density={SIDCO_DENSITY})"),
                    "SIDCo, LSTM": run_of("lstm", 2, "sidco"),
                },
                check=_sidco,
            ),
            Claim(
                "sidco/speed",
                "Training is up to 41.7 times faster than without compression, and 7.6 times "
                "faster than with top-k.",
                checked=True,
                cannot="The figures were measured on a cluster of GPUs. `benchmarks/kernels.py` "
                "times SIDCo on this machine's CPU.",
            ),
        ],
    ),
    Paper(
        "Max-norm quantization",
        "Vineeth S, 2021, [arXiv 2109.12497](https://arxiv.org/abs/2109.12497)",
        [
            Claim(
                "max_norm/bits",
                "With 2 workers, ResNet50 on CIFAR10 is 0.9 points behind uncompressed training "
                "with 4 "
                "bits, and 3.7 points with 2 bits (the author's logs).",
                checked=True,
                ran="The digits network, Adam, 2 workers, 440 steps. Unlike the author's code, "
                "our method keeps rounding errors in a residual, and has a scale for each "
                "variable.",
                runs={
                    "dense": run_of("digits", 2, "no_compression"),
                    "4 bits": MAX_NORM,
                    "2 bits": compressed(MAX_NORM, 2, "max_norm(bits=2)"),
                },
                check=_bits,
            ),
        ],
    ),
    Paper(
        "ACP-SGD",
        "Zhang et al., ICDCS 2023",
        [
            Claim(
                "acp_sgd/bytes",
                "The two factors are sent in turns, one in each step. This takes half of "
                "PowerSGD's bytes at equal rank, and training is as accurate.",
                checked=False,
                ran="The digits network, Adam, 8 workers, 440 steps, rank 4.",
                runs={
                    "both factors": run_of("digits", 8, "power_sgd"),
                    "alternating": run_of("digits", 8, ALTERNATING),
                },
                check=_halved,
            ),
            Claim(
                "acp_sgd/speed",
                "Training is 1.43 times faster than with PowerSGD, on average from 1 to 100 "
                "Gbit/s.",
                checked=True,
                cannot="The figure was measured on 8 to 64 GPUs.",
            ),
        ],
    ),
    Paper(
        "ARC-Top-K",
        "Chen et al., 2025, [arXiv 2510.26709](https://arxiv.org/abs/2510.26709)",
        [
            Claim(
                "arc_top_k/accuracy",
                "Training is as accurate as with top-k, with all-reduces instead of an all-gather.",
                checked=True,
                ran="The digits network, Adam, 8 workers, 440 steps, both methods with a density "
                "of 2 %.",
                runs={
                    "ARC-Top-K": ARC_TOP_K,
                    "top-k": compressed(ARC_TOP_K, 8, "top_k(density=0.02)"),
                },
                check=_arc_top_k,
            ),
            Claim(
                "arc_top_k/speed",
                "Training takes up to 60.7 % less time.",
                checked=True,
                cannot="The figure was measured on GPUs, and the abstract does not name the method "
                "that it is compared with.",
            ),
        ],
    ),
    Paper(
        "Count sketches",
        "Ivkin et al., NeurIPS 2019, [arXiv 1903.04488](https://arxiv.org/abs/1903.04488); Xian et "
        "al., ICDM 2022, [arXiv 2210.07454](https://arxiv.org/abs/2210.07454)",
        [
            Claim(
                "sketches/accuracy",
                "Sketched-SGD sends up to 40 times fewer bytes, and training is as accurate. "
                "(SketchedAMSGrad's abstract has no figure.)",
                checked=False,
                ran="The digits network, Adam, 8 workers, 440 steps, `count_sketch` with a "
                f"density of {DENSITY}, which sends about {TIMES} times fewer bytes.",
                runs={
                    "dense": run_of("digits", 8, "no_compression"),
                    "sketch": run_of("digits", 8, f"count_sketch(density={DENSITY})"),
                },
                check=_sketch,
            ),
        ],
    ),
)
