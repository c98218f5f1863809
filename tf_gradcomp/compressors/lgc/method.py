"""LGC: an autoencoder, which is trained during the job, codes the entries that a leader chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.compressors.lgc.autoencoder import Architecture, Described, weights_text
from tf_gradcomp.compressors.lgc.job_state import (
    ALL_REDUCE,
    CODING,
    FLOAT16,
    FLOAT32,
    PARAMETER_SERVER,
    AutoencoderHook,
    Settings,
)
from tf_gradcomp.compressors.lgc.stages import Coding, Collecting, Rounding, Summing, Switching
from tf_gradcomp.compressors.settings import SHARE, PerVariable, Valid, is_whole_number, member_of
from tf_gradcomp.compressors.stages import Staged
from tf_gradcomp.policy import CONVOLUTION, DENSE, EMBEDDING, RECURRENT, VECTOR, GradientSpec

_DENSITY = 0.001
_DENSE_STEPS = 200
_STEPS = Valid("a whole number of at least 1", lambda steps: is_whole_number(steps, 1, 2**31))
_KINDS = (CONVOLUTION, DENSE, RECURRENT)  # whose entries are chosen


class LGC(Settings, Staged):
    """Learned gradient compression: an autoencoder codes the largest entries of all replicas.

    In each step one replica leads: it finds its largest entries of residual plus gradient in each
    variable, and broadcasts their positions. The replicas' values at these positions are similar,
    and form a smooth curve in the order of the leader's values.
    An autoencoder that is trained on the job's own gradients codes them. Training has three phases:

    1. `warmup_steps` with dense gradients;
    2. `training_steps` in which the entries are gathered as float32, and the autoencoder learns;
    3. the rest, in which a code of a quarter as many floats is sent in place of the entries.

    **LGC needs `gc.callbacks.AutoencoderTraining`**, or a call of this callback in each step of
    your own training loop. Without training, the job stays in phase 2, and sums the entries as
    float32. If the autoencoder's error does not fall below `guard`, phase 2 lasts up to twice as
    long. If the error is still too large, the entries are then sent in 8 bits, without an
    autoencoder. Entries are also sent in 8 bits once the residuals of a replica in phase 3 become
    three times as large as at its beginning.

    The kernel of the first layer, vectors, embeddings and variables of fewer than 1024 elements are
    sent dense. Entries of the last layer's kernel are sent as float32. The first and last layers
    are known from `gc.Policy.from_model(model)` or `gc.Policy(ends=...)`, and otherwise unknown.

    The part of a replica's own entries that the autoencoder misses stays in the replica's residual.
    `ScaleCom` with few `value_bits` is the fair comparison: the same kind of indices, no training
    and no dense phase. The methods' documentation says which method to use.

    Use it if you have measured that it trains better than `ScaleCom(value_bits=8)`, which sends
    fewer bytes and needs no training.

    This is a reconstruction: only the abstract and a small part of the paper's text were at hand.

    Args:
        pattern: `"all_reduce"`: the codes of all replicas are averaged, and decoded once.
            `"parameter_server"`, without a server: the leader broadcasts its code, each replica
            gathers its `innovation`, and each replica decodes for all.
        density: The share of entries that is chosen, above 0 and up to 1, for all variables or by
            layer kind (see `gc.Policy`). Variables with None are sent dense.
        training_steps: Steps of phase 2.
        innovation: The share of the chosen entries that each replica sends uncoded, besides the
            leader's code; for `"parameter_server"`.
        latent_dtype: `"float32"`; or `"float16"`, which sends half the bytes of a code. With
            `"all_reduce"`, float16 codes are whole numbers of the leader's scale, so that sums are
            exact.
        guard: Phase 3 begins when the autoencoder's relative squared error, the mean over 20 steps,
            is below this number. Above 0 and up to 1.
        overrides: Density or None by regular expression over variable paths, with precedence over
            `density` and over the rules above for small and first layers; the first expression that
            is found anywhere in the path counts.
        autoencoder: A `gc.Autoencoder`, from whose weights training starts; or its description.
            None: the paper's, with new weights.
        **warmup: `warmup_steps`, the steps of phase 1, by default 200; and `warmup`, its method if
            not dense gradients, as for every method: see `Compressor`.

    Raises:
        ValueError: If a setting is out of range, or the autoencoder is for the other pattern.

    Reference:
        Abrahamyan et al., "Learned Gradient Compression for Distributed Deep Learning", IEEE TNNLS
        33(12), https://arxiv.org/abs/2103.08870
    """

    name = "lgc"
    main_stage = CODING
    helped_by_precondition = True

    def __init__(
        self,
        pattern: str = ALL_REDUCE,
        density: float | Mapping[str, float | None] | None = _DENSITY,
        training_steps: int = 300,
        innovation: float = 0.01,
        latent_dtype: str = FLOAT32,
        guard: float = 0.5,
        overrides: Mapping[str, float | None] | None = None,
        autoencoder: Mapping[str, Any] | Described | None = None,
        **warmup: Any,
    ) -> None:
        super().__init__(**{"warmup_steps": _DENSE_STEPS, **warmup})
        self.pattern = member_of(ALL_REDUCE, PARAMETER_SERVER).checked("LGC: pattern", pattern)
        if not isinstance(density, Mapping):
            density = dict.fromkeys(_KINDS, density)
        defaults = dict.fromkeys(_KINDS, _DENSITY) | dict.fromkeys((EMBEDDING, VECTOR))
        self.density = PerVariable("LGC: density", density, defaults, overrides, SHARE)
        self.overrides = self.density.overrides
        self.training_steps = _STEPS.checked("LGC: training_steps", training_steps)
        self.innovation = float(SHARE.checked("LGC: innovation", innovation))
        self.latent_dtype = member_of(FLOAT32, FLOAT16).checked("LGC: latent_dtype", latent_dtype)
        self.guard = float(SHARE.checked("LGC: guard", guard))
        self.architecture = Architecture.of(autoencoder).checked_weights(self.innovations)
        is_default = self.architecture == Architecture() and self.architecture.weights is None
        self.autoencoder = None if is_default else self.architecture.description()
        self.stages = (
            Summing(self),
            Collecting(self),
            Switching(self),
            Coding(self),
            Rounding(self),
        )

    def hook(self, specs: Sequence[GradientSpec], replicas: int) -> AutoencoderHook:
        """Returns the hook that trains the autoencoder."""
        return AutoencoderHook(self, specs)

    def stage(self, step: tf.Tensor, job_state: Mapping[str, tf.Variable]) -> tf.Tensor:
        """Returns the index of the job's stage."""
        return tf.cast(self.current_stage(job_state), tf.int32)

    def get_config(self) -> dict[str, Any]:
        # Without a warm-up, its steps are 0, which is not the default.
        return {**super().get_config(), "warmup_steps": self.warmup_steps}

    def __repr__(self) -> str:
        config = self.get_config()
        if self.architecture.weights is not None:  # a digest in their place
            config["autoencoder"] |= {"weights": weights_text(self.architecture)}
        return f"LGC({', '.join(f'{name}={value!r}' for name, value in config.items())})"
