"""Draws random programs, for each check its kind of programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tests.net.program import CHECKPOINT, STORE, WEIGHTS, Job, Program, Step
from tests.replicas import names_without_stages
from tf_gradcomp.compressors import get
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.policy import GradientSpec

SHAPES = [(3,), (7,), (1,), (40,), (3, 2), (5, 4), (1, 9), (2, 3, 4)]
TABLES = [(4, 2), (7, 3)]

# Sending every entry at once, in float32.
WHOLE = [
    "no_compression",
    "adacomp(bin_sizes=None)",
    "top_k(density=1.0)",
    "top_k(density=None)",
    "scalecom(rates=None)",
    "power_sgd(rank=None)",
    "qsgd(bits=None)",
    "max_norm(bits=None)",
    "arc_top_k(density=None)",
]
SENDING_THE_LARGEST = [
    "adacomp(bin_sizes=3)",
    "adacomp(bin_sizes=7)",
    "top_k(density=0.2)",
    "scalecom(rates=4)",
]


def keeps_a_residual(name: str) -> bool:
    """Returns whether a method must lose nothing."""
    return RESIDUAL in get(name).state(GradientSpec("a", (1,), "float32", "dense"))


SETTINGS = [
    *SENDING_THE_LARGEST,
    "adacomp(bin_sizes=3, scale_factor=1)",
    "scalecom(rates=3, beta=0.25)",
    "scalecom(rates=3, beta=0.25, value_bits=16)",
    "scalecom(rates=4, value_bits=4)",
    "qsgd(bits=2, bucket_size=32)",
    "qsgd(bits={'vector': 4})",
    "count_sketch(density=0.03)",
    "max_norm(bits=2)",
    "max_norm(bits=(2, 6), density=0.5)",
    "power_sgd(rank=1)",
    "power_sgd(rank=1, alternate=True)",
    "arc_top_k(density=0.3, rank=1, block=2)",
    "lgreco(method='adacomp(bin_sizes=3)')",
]
# Methods that are not among `SETTINGS` are drawn with their own.
OTHERS = [
    name
    for name in names_without_stages()
    if keeps_a_residual(name) and not any(one.startswith(f"{name}(") for one in SETTINGS)
]
LOSSLESS = [*SETTINGS, *OTHERS, *["no_compression"] * 5]  # which keeps nothing
CASTS = ["cast", "cast(dtype='bfloat16')"]
WARMED_UP = [  # these need collectives
    "top_k(density=0.2, warmup_steps=2)",
    "adacomp(bin_sizes=3, warmup_steps=1, warmup='adacomp(bin_sizes=None)')",
    "scalecom(rates=4, warmup_steps=2, warmup='no_compression')",
]

_RATES = st.sampled_from([0.5, 0.125, 0.03])
OPTIMIZERS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "SGD": {"momentum": st.just(0.5), "nesterov": st.booleans()},
    "RMSprop": {"momentum": st.just(0.5), "centered": st.booleans()},
    "Adam": {"amsgrad": st.booleans(), "beta_1": st.just(0.5), "epsilon": st.just(1e-3)},
    "AdamW": {"amsgrad": st.booleans(), "weight_decay": st.just(0.25)},
    "Nadam": {"beta_2": st.just(0.9)},
    "Lamb": {"beta_1": st.just(0.5)},
    "Adamax": {"beta_2": st.just(0.5)},
    "Adadelta": {},
    "Adagrad": {},
    "Adafactor": {"relative_step": st.booleans()},
    "Ftrl": {"l1_regularization_strength": st.just(0.01)},
    "Lion": {"beta_1": st.just(0.5)},
    "Muon": {},
    "ScheduleFreeAdamW": {"warmup_steps": st.just(3)},
}
UNTRACKED = ("Adafactor", "Nadam")  # Keras saves only a part of their state, in a loss scaler
PRECONDITIONED = ("Adam", "AdamW", "Nadam", "Lamb")

_clipping = st.sampled_from([{"clipnorm": 0.5}, {"global_clipnorm": 1.0}, {"clipvalue": 0.25}])
_averaging = st.sampled_from(
    [
        {"use_ema": True, "ema_momentum": 0.5},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    ]
)
_decay = st.just({"weight_decay": 0.125})
_accumulating = st.sampled_from([2, 3]).map(lambda steps: {"gradient_accumulation_steps": steps})
_static = st.sampled_from([4.0, 1024.0]).map(lambda factor: {"loss_scale_factor": factor})
NONE: st.SearchStrategy[dict[str, Any]] = st.just({})


def _maybe(settings: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(NONE, NONE, settings)


@st.composite
def settings_of(draw: Any, optimizer: str) -> dict[str, Any]:
    """Draws settings of an optimizer: some of its own, and some that all optimizers have."""
    local = OPTIMIZERS[optimizer]
    return {
        "learning_rate": draw(_RATES),
        **draw(_maybe(_decay)),
        **draw(st.fixed_dictionaries({}, optional=local)),
        # With the default, sparse methods are refused.
        **({"epsilon_1": 1e-10} if optimizer == "Adafactor" else {}),
        **draw(_maybe(_clipping)),
        **draw(_maybe(_averaging)),
        **draw(_maybe(_static)),
    }


@st.composite
def variables(draw: Any) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Draws one to three shapes, and which of them are tables."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=draw(st.integers(1, 2)), max_size=3))
    if draw(st.sampled_from([False, False, True])):
        shapes.append(draw(st.sampled_from(TABLES)))
        return tuple(shapes), (len(shapes) - 1,)
    return tuple(shapes), ()


@st.composite
def jobs(
    draw: Any,
    program: Program,
    methods: Sequence[str],
    longest: int,
    *,
    first: bool = True,
) -> Job:
    """Draws a job of a program.

    Args:
        draw: Hypothesis' own.
        program: Which it is to be one of.
        methods: Its compressor is one of these.
        longest: How many updates there are at most.
        first: Whether the job resumes from no other job.
    """
    warms_up = any("warmup" in method for method in methods)
    collective = warms_up and draw(st.sampled_from([False, False, False, True]))
    replicas = 2 if collective else draw(st.sampled_from([2, 1, 3] if first else [1, 2, 1, 3]))
    known = [m for m in methods if collective or replicas == 1 or "warmup" not in m]
    values = list(range(len(program.shapes)))
    all_of_them = st.just(tuple(values))
    subsets = st.lists(st.sampled_from(values), min_size=1, unique=True).map(sorted).map(tuple)
    with_gradient = st.one_of(all_of_them, subsets, subsets)
    can_skip = replicas > 1 or (program.scaler and program.micro_steps == 1)
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, longest))):
        given = draw(with_gradient)
        for _ in range(program.micro_steps):
            bad = draw(st.sampled_from([(), (), (), (0,), (replicas - 1,), tuple(range(replicas))]))
            steps.append(Step(draw(st.integers(0, 99)), given, bad if can_skip else ()))
    return Job(
        replicas,
        draw(st.sampled_from(known)),
        tuple(steps),
        collective=collective,
        graph=draw(st.sampled_from([False] * 7 + [True])),
        resumes=draw(st.sampled_from([STORE, WEIGHTS, CHECKPOINT])),
    )


@st.composite
def dense_programs(draw: Any, *, accumulating: bool = False) -> Program:
    """Draws programs of methods that send everything."""
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    settings = {
        **draw(settings_of(optimizer)),
        **draw(_accumulating if accumulating else NONE),
    }
    shapes, tables = draw(variables())
    scaler = None
    if "loss_scale_factor" in settings:
        tables = ()  # Keras cannot divide slices
    elif optimizer not in UNTRACKED:
        scaler = draw(st.sampled_from([None, None, "inside", "around"]))
    limit = draw(st.sampled_from([2**26, 10])) if tables else 2**26
    program = Program(shapes, optimizer, settings, (), tables, scaler, limit)
    # Lion takes signs: it shows the rounding of a residual that is shared out among three.
    jobs = st.just(1) if optimizer == "Lion" else st.integers(1, 2)
    return _with_jobs(draw, program, jobs, WHOLE, 4)


@st.composite
def lossless_programs(
    draw: Any,
    methods: Sequence[str] = (*LOSSLESS, *WARMED_UP),
    *,
    most_jobs: int = 1,
    static: bool = False,
) -> Program:
    """Trains by SGD at rate 1, so that weights show the applied gradients.

    Args:
        draw: Hypothesis' own.
        methods: Of these.
        most_jobs: With so many jobs at most, and two at least unless it is one.
        static: Whether there is a static loss scale.
    """
    settings = {
        "learning_rate": 1.0,
        **draw(_maybe(_accumulating)),
        **draw(_static if static else NONE),
        **draw(_maybe(st.just({"use_ema": True}))),
    }
    shapes, tables = draw(variables())
    if "loss_scale_factor" in settings:
        tables, scaler = (), None
    else:
        scaler = draw(st.sampled_from([None, None, "inside", "around"]))
    program = Program(shapes, "SGD", settings, (), tables, scaler)
    count = st.integers(min(2, most_jobs), most_jobs)
    return draw(_with_rivals(_with_jobs(draw, program, count, methods, 4)))


@st.composite
def scaled_programs(draw: Any) -> Program:
    """With a loss scale of some kind, and with methods that divide by second moments."""
    optimizer = draw(st.sampled_from(["SGD", *PRECONDITIONED]))
    settings = {**draw(settings_of(optimizer)), **draw(_maybe(_accumulating))}
    shapes, _ = draw(variables())
    scaler = None
    if optimizer not in UNTRACKED:
        scaler = draw(st.sampled_from([None, "inside", "around"]))
    if scaler:
        settings.pop("loss_scale_factor", None)
    else:
        settings["loss_scale_factor"] = 16.0
    program = Program(shapes, optimizer, settings, (), (), scaler)
    program = _with_jobs(draw, program, st.integers(1, 2), SENDING_THE_LARGEST, 3)
    precondition = draw(st.sampled_from(["auto", None]))
    several = [
        dataclasses.replace(job, precondition=precondition, replicas=max(job.replicas, 2))
        for job in program.jobs
    ]
    return dataclasses.replace(program, jobs=tuple(several))


@st.composite
def _with_rivals(draw: Any, program: Program) -> Program:
    """The same program, some of whose methods may be a choice."""
    rivals = st.sampled_from([None, None, "no_compression", "scalecom(rates=3, beta=0.25)"])
    several = [
        job if job.collective else dataclasses.replace(job, rival=draw(rivals))
        for job in program.jobs
    ]
    return dataclasses.replace(program, jobs=tuple(several))


@st.composite
def paced_programs(draw: Any) -> Program:
    """Draws two jobs of Adam's family with other settings each."""
    optimizer = draw(st.sampled_from(PRECONDITIONED))
    settings = {"learning_rate": 0.01, **draw(_maybe(st.just({"amsgrad": True})))}
    if optimizer not in ("Adam", "AdamW"):
        settings.pop("amsgrad", None)
    program = Program(((3, 4), (9,)), optimizer, settings, ())
    before, after = draw(st.sampled_from([(None, "auto"), ("auto", None), ("auto", "auto")]))
    both = (draw(_paced(program, 40, before)), draw(_paced(program, 10, after)))
    return draw(_with_rivals(dataclasses.replace(program, jobs=both)))


@st.composite
def _paced(draw: Any, program: Program, steps: int, precondition: str | None) -> Job:
    methods = SENDING_THE_LARGEST
    if precondition is None:
        methods = [*methods, "no_compression", "qsgd(bits=8)"]
    all_of_them = tuple(range(len(program.shapes)))
    return Job(
        draw(st.sampled_from([2, 2, 1, 3])),
        draw(st.sampled_from(methods)),
        (Step(draw(st.integers(0, 9)) * 1000, all_of_them, times=steps),),
        precondition=precondition,
        graph=True,
        resumes=draw(st.sampled_from([STORE, WEIGHTS, CHECKPOINT])),
    )


def _with_jobs(
    draw: Any,
    program: Program,
    count: st.SearchStrategy[int],
    methods: Sequence[str],
    longest: int,
) -> Program:
    number = draw(count)
    drawn = [draw(jobs(program, methods, longest, first=i == 0)) for i in range(number)]
    return dataclasses.replace(program, jobs=tuple(drawn))
