"""The contract between a compression method and the rest of the package stays small."""

import pytest

from tf_gradcomp.compressors import Compressor, HasSettings, NoCompression, Plannable, get, names
from tf_gradcomp.compressors.stages import Phased

pytestmark = pytest.mark.quick


def required(kind):
    """Returns the members that a subclass must provide: the abstract ones and bare annotations."""
    bare = {name for name in kind.__annotations__ if not hasattr(kind, name)}
    return bare | kind.__abstractmethods__


def members(kind):
    """Returns the public members of a class, its own and the inherited ones."""
    annotated = {name for one in kind.__mro__ for name in vars(one).get("__annotations__", {})}
    return {name for name in {*dir(kind), *annotated} if not name.startswith("_")}


def test_a_method_must_provide_at_most_six_members():
    assert required(Compressor) == {"name", "exchange"}
    assert len(required(Compressor) | required(Plannable)) <= 6


def test_a_compressor_has_nothing_that_only_methods_with_settings_need():
    of_all, with_settings, planned = map(members, (Compressor, HasSettings, Plannable))
    assert with_settings - of_all == {"settings", "settings_in_force", "delays_unless"}
    assert planned - with_settings == {"choices", "costs", "state_for"}
    assert members(Phased) - of_all == {"phases", "phase", "settles_in"}


def test_a_compressor_has_at_most_ten_members():
    of_one = set(vars(NoCompression())) | members(Compressor)
    assert of_one == {
        *("name", "exchange", "state", "warmup", "warmup_steps"),
        *("get_config", "from_config", "fingerprint"),
        *("has_gpu_kernels", "helped_by_precondition"),
    }


def test_methods_that_can_be_planned():
    methods = {name for name in names() if name != "auto" and isinstance(get(name), Plannable)}
    assert methods == {"adacomp", "arc_top_k", "max_norm", "power_sgd", "qsgd", "scalecom", "top_k"}
