"""The contract between a compression method and the rest of the package stays small."""

import pytest

from tf_gradcomp.compressors import Compressor, HasSettings, Plannable, get, names

pytestmark = pytest.mark.quick


def required(kind):
    """Returns the members that a subclass must provide: the abstract ones and bare annotations."""
    bare = {name for name in kind.__annotations__ if not hasattr(kind, name)}
    return bare | kind.__abstractmethods__


def test_a_method_must_provide_at_most_six_members():
    assert required(Compressor) == {"name", "exchange"}
    assert len(required(Compressor) | required(Plannable)) <= 6


def test_a_compressor_has_nothing_that_only_methods_with_settings_need():
    own = {name for name in dir(HasSettings) if not name.startswith("_")}
    of_all = {name for name in dir(Compressor) if not name.startswith("_")}
    assert own - of_all == {"settings", "payload_bytes", "delays_unless"}
    assert len(of_all) <= 21
    own = {name for name in dir(Plannable) if not name.startswith("_")} - own
    assert own == {"choices", "costs", "state_for"}


def test_methods_that_can_be_planned():
    methods = {name for name in names() if name != "auto" and isinstance(get(name), Plannable)}
    assert methods == {"adacomp", "power_sgd", "qsgd", "scalecom", "top_k"}
