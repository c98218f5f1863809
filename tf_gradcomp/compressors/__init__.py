"""The compression methods, one in each file, and how to name, save and load them."""

from tf_gradcomp.compressors.adacomp import AdaComp
from tf_gradcomp.compressors.auto import Auto, methods_of
from tf_gradcomp.compressors.base import (
    Compressor,
    Hook,
    JobStateSpec,
    Reduced,
    StateSpec,
    StepInputs,
)
from tf_gradcomp.compressors.cast import Cast
from tf_gradcomp.compressors.contrib.arc_top_k import ArcTopK
from tf_gradcomp.compressors.contrib.count_sketch import CountSketch
from tf_gradcomp.compressors.contrib.max_norm import MaxNormQuantization
from tf_gradcomp.compressors.contrib.random_k import RandomK
from tf_gradcomp.compressors.contrib.sidco import SIDCo
from tf_gradcomp.compressors.contrib.sign_sgd import SignSGD
from tf_gradcomp.compressors.lgc.method import LGC
from tf_gradcomp.compressors.lgreco import LGreCo
from tf_gradcomp.compressors.no_compression import NoCompression
from tf_gradcomp.compressors.plans import Plannable
from tf_gradcomp.compressors.power_sgd import PowerSGD
from tf_gradcomp.compressors.qsgd import QSGD
from tf_gradcomp.compressors.registry import deserialize, get, names, serialize, text_of
from tf_gradcomp.compressors.scalecom import ScaleCom
from tf_gradcomp.compressors.stages import Staged
from tf_gradcomp.compressors.top_k import TopK

__all__ = [
    "LGC",
    "QSGD",
    "AdaComp",
    "ArcTopK",
    "Auto",
    "Cast",
    "Compressor",
    "CountSketch",
    "Hook",
    "JobStateSpec",
    "LGreCo",
    "MaxNormQuantization",
    "NoCompression",
    "Plannable",
    "PowerSGD",
    "RandomK",
    "Reduced",
    "SIDCo",
    "ScaleCom",
    "SignSGD",
    "Staged",
    "StateSpec",
    "StepInputs",
    "TopK",
    "deserialize",
    "get",
    "methods_of",
    "names",
    "serialize",
    "text_of",
]
