"""Functions of Keras and TensorFlow, to see which of them a program has replaced."""

import inspect
import pkgutil
import sys

_PACKAGES = ("keras.src", "tensorflow.python")


def snapshot():
    """Returns the functions of each module that is loaded, and of each class in it, by name."""
    owners = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name.startswith(_PACKAGES):
            owners[name] = _functions(module)
            for value in list(vars(module).values()):
                if inspect.isclass(value) and value.__module__ == name:
                    owners[f"{name}.{value.__qualname__}"] = _functions(value)
    return owners


def _functions(owner):
    """Returns functions, and on classes also properties and other descriptors."""
    return {name: value for name, value in vars(owner).items() if hasattr(type(value), "__get__")}


def changed(before):
    """Returns the names of the functions that are others now, or new."""
    now = snapshot()
    return {
        f"{owner}.{name}"
        for owner, functions in before.items()
        for name, function in now[owner].items()
        if functions.get(name) is not function
    }


def canonical(name):
    """Returns the name of a function in the module that defines its class."""
    owner, _, attribute = name.rpartition(".")
    value = pkgutil.resolve_name(owner)
    if inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}.{attribute}"
    return name
