"""Settings out of range, of a wrong type or unknown are refused with a message.

What is refused for other reasons than the arguments of one call is tested with its subject.
"""

from functools import partial
from itertools import chain, product

import keras
import pytest

import tf_gradcomp as gc
from tf_gradcomp import callbacks
from tf_gradcomp.compressors import (
    LGC,
    QSGD,
    AdaComp,
    ArcTopK,
    Auto,
    Cast,
    CountSketch,
    JobStateSpec,
    LGreCo,
    MaxNormQuantization,
    PowerSGD,
    RandomK,
    ScaleCom,
    SIDCo,
    TopK,
    deserialize,
    get,
)
from tf_gradcomp.launch import LocalJob

NAN, INFINITY = float("nan"), float("inf")
AVERAGED = {"class_name": "SGD", "config": {"use_ema": True}}
SHARE = "must be a number above 0 and up to 1"
SHARE_OR_WHOLE = f"{SHARE}, or None to send variables whole"
BITS = "must be a whole number from 2 to 8, or None to send .*; received"
ADAM, ROUNDS = partial(gc.CompressedOptimizer, "adam"), partial(gc.LocalSteps, 2)
JOB = partial(LocalJob, ["true"], workers=2)
OPTIMIZER = gc.CompressedOptimizer
EVERY = 'every must be "epoch" or a whole number of at least 1'


def case(call, message, error=ValueError, /, **settings):
    """Returns a case for each combination of the values that settings have."""
    values = [dict(zip(settings, one, strict=True)) for one in product(*settings.values())]
    return [pytest.param(call, value, error, message, id=message) for value in values]


CASES = [
    case(
        AdaComp,
        "AdaComp: bin_sizes must be a whole number from 1 to 16383, or None .*; received",
        bin_sizes=[0, -1, 16384, 2.5, "50", True],
    ),
    case(
        AdaComp,
        "scale_factor must be a number of at least 1, and finite",
        scale_factor=[0.5, 0, -2, 1e39, NAN, INFINITY, "2", None],
    ),
    case(
        AdaComp,
        "AdaComp: warmup_steps must be a whole number, 0 or more",
        warmup_steps=[-1, 2.0, "3", None, True],
    ),
    case(AdaComp, "unknown name 'gentle'", warmup_steps=[3], warmup=["gentle"]),
    case(AdaComp, "warm-up must be a method", warmup_steps=[3], warmup=["auto"]),
    case(ArcTopK, f"ArcTopK: density {SHARE}", density=[0, 1.5, -0.5, "0.1", True]),
    case(ArcTopK, "ArcTopK: block must be a whole number from 1 to 65536", block=[0]),
    case(ArcTopK, "rank must be a whole number that divides block, 128", rank=[3]),
    case(ArcTopK, "rank must be a whole number that divides block, 8", rank=[16], block=[8]),
    case(Auto, "expected a list of candidates", candidates=[[], "cast", Cast()]),
    case(Auto, "a candidate must be a method", candidates=[["auto"]]),
    case(Auto, "unknown name", candidates=[["nothing"]]),
    case(
        Cast,
        "Cast: dtype must be one of 'float16', 'bfloat16'; received",
        dtype=["float32", "half", None, 16],
    ),
    case(CountSketch, f"CountSketch: density {SHARE}; received", density=[0, "0.1"]),
    case(JobStateSpec, "int64 cannot be divided among", dtype=["int64"], shared=[False]),
    case(LGC, "pattern must be one of 'all_reduce', 'parameter_server'", pattern=["ring"]),
    case(LGC, f"density.* {SHARE}", density=[0]),
    case(LGC, "training_steps must be a whole number of at least 1", training_steps=[0]),
    case(LGC, "warmup_steps must be a whole number, 0 or more", warmup_steps=[-1]),
    case(LGC, f"innovation {SHARE}", innovation=[2]),
    case(LGC, "latent_dtype must be one of 'float32', 'float16'", latent_dtype=["int8"]),
    case(LGC, f"guard {SHARE}", guard=[0.0]),
    case(LGC, "autoencoder must be a gc.Autoencoder", autoencoder=[3]),
    case(LGC, "strides of encoder and decoder", autoencoder=[{"encoder": [[4, 3, 2]]}]),
    case(LGC, "has 1 weights; expected 216,677", autoencoder=[{"weights": [1.0]}]),
    case(
        LGreCo, "has no setting that can be planned", method=["cast", RandomK(), "auto", LGreCo()]
    ),
    case(LGreCo, "has a warm-up; give it to LGreCo", method=[TopK(warmup_steps=3)]),
    case(LGreCo, "choices has no values", choices=[[]]),
    case(LGreCo, "among the choices must be a whole number of at least 1", choices=[[2, 0]]),
    case(LGreCo, "a number above 0 and up to 1", method=["top_k"], choices=[[2.0]]),
    case(LGreCo, "choices must be whole numbers", method=["max_norm"], choices=[[(2, 6)]]),
    case(
        MaxNormQuantization,
        "MaxNormQuantization: bits.* from 2 to 8, or a pair",
        bits=[1, 9, 4.0, True, "4", (4,) * 2, (2, 17), (1, 6), (2, 4, 6), [], {"dense": 0}],
    ),
    case(
        MaxNormQuantization,
        "MaxNormQuantization: density must be .* 1/65536",
        density=[0, 1.5, 1e-6, "0.1", True],
    ),
    case(
        PowerSGD,
        "PowerSGD: rank must be a whole number of at least 1, or None .*; received",
        rank=[0, -1, 2.5, "4", True],
    ),
    case(
        PowerSGD, "PowerSGD: alternate must be True or False; received", alternate=[None, 1, "yes"]
    ),
    case(QSGD, f"QSGD: bits of 'convolution' {BITS}", bits=[1, 0, 9, -4, 4.0, "4", True]),
    case(QSGD, f"QSGD: bits of 'vector' {BITS}", bits=[{"vector": 1}, {"vector": 9}]),
    case(QSGD, f"QSGD: bits of 'bias' {BITS}", overrides=[{"bias": 1}, {"bias": 9}]),
    case(
        QSGD,
        "bucket_size must be a multiple of 32 up to 65536; received",
        bucket_size=[0, -32, 31, 1000, 65537, 65568, 1024.0, None, True],
    ),
    case(
        RandomK,
        "RandomK: density must be a number from 1/65536 to 1",
        density=[0, 1.1, -0.5, 1e-6, "0.1", True],
    ),
    case(
        ScaleCom,
        "ScaleCom: beta must be a number above 0, also as float32",
        beta=[0, 1e-46, -0.1, 1.1, NAN, "1", True, None],
    ),
    case(
        ScaleCom,
        "a whole number from 1 to 65536, or 'rule', or None",
        rates=[0, 65537, 2.5, "rules", True],
    ),
    case(
        ScaleCom,
        "value_bits must be one of 32, 16, 8, 4, 1; received",
        value_bits=[0, 2, 31, 64, True, 8.0, "8", None],
    ),
    case(
        SIDCo,
        "SIDCo: density must be a number above 0 and below 1",
        density=[0, 1, -0.5, "0.1", True, None],
    ),
    case(TopK, f"TopK: density {SHARE_OR_WHOLE}", density=[0, -0.1, 1.5, "0.1", True, NAN]),
    case(TopK, f"TopK: density of 'dense' {SHARE_OR_WHOLE}", density=[{"dense": 0}]),
    case(TopK, f"TopK: density of 'bias' {SHARE_OR_WHOLE}", overrides=[{"bias": 0}]),
    case(
        TopK,
        "TopK: momentum must be a number from 0 to below 1, also as float32",
        momentum=[-0.1, 1, 1.5, 1 - 1e-9, "0.9", None, True, NAN],
    ),
    case(
        TopK,
        "TopK: clip_norm must be a number above 0, also as float32",
        clip_norm=[0, -1, 1e-50, 1e39, INFINITY, NAN, "1", True],
    ),
    case(
        TopK,
        "value_bits must be one of 32, 16, 8, 4, 2, 1; received",
        value_bits=[0, 3, 64, True, "8", None],
    ),
    case(
        TopK,
        "chunk must be a power of two from 2 to 65536, or None",
        chunk=[0, 1, 3, 131072, True, "64"],
    ),
    case(
        get,
        r"compressor: expected a name \(adacomp.*received",
        TypeError,
        identifier=[None, 3, AssertionError],
    ),
    case(
        get,
        r"compressor: cannot read 'adacomp\(.*expected a name, or",
        identifier=[
            "adacomp(",
            "adacomp(3)",
            "adacomp(bin_sizes=50)(scale_factor=3.0)",
            "adacomp(bin_sizes=3)[0]",
            "adacomp(bin_sizes=3, bin_sizes=4)",
            "adacomp(scale_factor=7/2)",
        ],
    ),
    case(get, r"cannot read 'top_k\(0\.1' \('\(' was never closed\);", identifier=["top_k(0.1"]),
    case(
        get,
        r"'adacomp' has no setting 'bin_size'; did you mean 'bin_sizes'\? Expected bin_sizes, "
        "scale_factor, .*warmup_steps",
        identifier=["adacomp(bin_size=3)"],
    ),
    case(get, "unknown name '.*'; expected one of adacomp", identifier=["zip", "none"]),
    case(
        get,
        r"unknown name '.*'; did you mean 'power_sgd'\? Expected",
        identifier=["powersgd", "PowerSGD(rank=3)"],
    ),
    case(get, r"'; did you mean 'top_k'\? Expected", identifier=["TopK"]),
    case(get, r"'; did you mean 'adacomp'\? Expected", identifier=["adcomp"]),
    case(
        deserialize,
        "expected a config with the keys 'name' and 'config'",
        description=[{}, {"name": "adacomp"}, {"bin_sizes": 5}],
    ),
    case(
        gc.Policy,
        "unknown layer kind '(conv||Dense)' for 'a/kernel'; expected one of convolution",
        kinds=[{"a/kernel": "conv"}, {"a/kernel": ""}, {"a/kernel": "Dense"}],
    ),
    case(gc.LocalSteps, "expected a whole number", steps=[0, 2.5]),
    case(ROUNDS, "expected a whole number", warmup_steps=[-1]),
    case(
        gc.LocalSteps,
        r"or a list of \(step, number\)",
        steps=[[], [(1, 4)], [(0, 4), (0, 8)], [(0, 0)], [3], "often"],
    ),
    case(ROUNDS, "expected a whole number of fragments", fragments=[0]),
    case(ROUNDS, "residual_decay between 0 and 1", residual_decay=[1.5]),
    case(ROUNDS, "expected a Keras optimizer as outer", TypeError, outer=[3]),
    case(ROUNDS, "use_ema, which has no meaning", outer=[AVERAGED]),
    case(gc.Gossip, "expected 'ring' as graph", graph=["star"]),
    case(gc.Gossip, "expected a whole number as rank", rank=[0]),
    case(gc.Gossip, "expected a whole number of steps", steps=[0]),
    case(gc.Gossip, "above 0 and below 2", diffusion=[2.0]),
    case(
        OPTIMIZER,
        "expected a Keras 3 optimizer.*; received",
        TypeError,
        inner_optimizer=[None, 3, keras.optimizers.Adam, object()],
    ),
    case(OPTIMIZER, "adamantium", inner_optimizer=["adamantium"]),
    case(
        OPTIMIZER,
        "the optimizer comes first, then the compressor",
        TypeError,
        inner_optimizer=["scalecom", "top_k(density=0.1)", AdaComp()],
        compressor=["adam"],
    ),
    case(ADAM, "unknown name 'zip'", compressor=["zip"]),
    case(ADAM, "expected a name", TypeError, compressor=[5]),
    case(
        ADAM, r"^CompressedOptimizer\.__init__\(\) got an unexpected", TypeError, compresor=["cast"]
    ),
    case(ADAM, r"policy: expected a gc\.Policy; received 'dense'", TypeError, policy=["dense"]),
    case(
        gc.MultiWorkerMirroredStrategy,
        r"policy: expected a gc\.Policy; received 'dense'",
        TypeError,
        compressor=["adacomp"],
        policy=["dense"],
    ),
    case(ADAM, 'expected "auto", "local" or None', precondition=["global", True, 1]),
    case(
        OPTIMIZER,
        "is for Adam, AdamW, Nadam, Lamb; received SGD",
        inner_optimizer=["sgd"],
        precondition=["local"],
    ),
    case(ADAM, 'precondition="local" is for gradients', precondition=["local"], local_steps=[2]),
    case(OPTIMIZER, "use_ema would average", inner_optimizer=[AVERAGED], local_steps=[2]),
    case(ADAM, "'lgc' learns from the gradients of each step", compressor=["lgc"], local_steps=[2]),
    case(ADAM, "'top_k' would exchange nothing", compressor=["top_k"], local_steps=[gc.Gossip()]),
    case(ADAM, "expected .horovod., gc.HorovodGroup.*received 'mpi'", group=["mpi"]),
    case(ADAM, 'reduction must be "sum", "mean".*received \'average\'', reduction=["average"]),
    case(
        callbacks.LayerwisePlan, f"LayerwisePlan: {EVERY}", every=[0, -1, 2.0, True, "step", None]
    ),
    case(callbacks.CollectState, f"CollectState: {EVERY}", every=[0, "batch", True, 1.5]),
    case(callbacks.DelayCheck, "DelayCheck: .* received", every=[0, "epoch"]),
    case(
        callbacks.CompressionMonitor,
        "expected table=True, False or 'all'; received 'some'",
        table=["some"],
    ),
    case(JOB, "at least one worker", workers=[0]),
    case(JOB, "each of the 2 workers", worker_env=[[{}]]),
    case(JOB, "hosts must have one entry for each of the 2 workers", hosts=[["10.0.0.1"]]),
]


@pytest.mark.parametrize(("call", "settings", "error", "message"), list(chain(*CASES)))
def test_it_is_refused(call, settings, error, message):
    with pytest.raises(error, match=message):
        call(**settings)
