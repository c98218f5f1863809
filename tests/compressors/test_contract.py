"""The contract between a compression method and the rest of the package stays small."""

import pytest

from tf_gradcomp.compressors import Compressor, Plannable, get, names
from tf_gradcomp.compressors.stages import Staged

pytestmark = pytest.mark.quick


def required(kind):
    """Returns the members that a subclass must provide: the abstract ones and bare annotations."""
    bare = {name for name in kind.__annotations__ if not hasattr(kind, name)}
    return bare | kind.__abstractmethods__


def members(kind):
    """Returns the public members of a class, its own and the inherited ones."""
    annotated = {name for one in kind.__mro__ for name in vars(one).get("__annotations__", {})}
    return {name for name in {*dir(kind), *annotated} if not name.startswith("_")}


def test_a_method_must_provide_a_name_and_reduce():
    assert required(Compressor) == {"name", "reduce"}


def test_a_method_with_plans_must_also_provide_settings_and_their_costs():
    assert required(Plannable) - required(Compressor) == {"settings", "choices", "costs"}


def test_methods_with_stages_have_them_in_addition():
    assert members(Staged) - members(Compressor) == {"stages", "stage", "main_stage"}


def test_a_method_that_does_not_keep_an_argument_is_refused():
    class Forgetful(Compressor, registered=False):
        name = "forgetful"

        def __init__(self, density=0.1):
            super().__init__()

        def reduce(self, inputs):
            yield from ()

    with pytest.raises(TypeError, match=r"Forgetful does not keep its argument 'density'"):
        Forgetful().get_config()


def test_methods_that_can_be_planned():
    methods = {name for name in names() if name != "auto" and isinstance(get(name), Plannable)}
    assert methods == {"adacomp", "arc_top_k", "max_norm", "power_sgd", "qsgd", "scalecom", "top_k"}
