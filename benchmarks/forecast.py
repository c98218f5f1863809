"""Predictions of `gc.advise` for the contenders of the network benchmark."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tf_gradcomp.advice.probe import THOROUGH, probe
from tf_gradcomp.compressors import get, methods_of, text_of
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.setup import Candidate
from tf_gradcomp.groups.strategy_group import StrategyGroup


def forecast(
    strategy: tf.distribute.Strategy, exchanges: Mapping[str, GradientExchange]
) -> dict[str, float]:
    """Returns the seconds of an exchange by name; a choice takes its fastest method."""
    methods = {name: methods_of(get(name)) for name in exchanges}
    each = {text_of(method): method for of_name in methods.values() for method in of_name}
    if not each:
        return {}
    specs = next(iter(exchanges.values())).specs
    candidates = [Candidate(method) for method in each.values()]
    probed = probe(StrategyGroup(strategy), specs, candidates, THOROUGH)
    seconds = {prediction.method: prediction.exchange for prediction in probed.predictions}
    return {
        name: min(seconds[text_of(method)] for method in of_name)
        for name, of_name in methods.items()
    }
