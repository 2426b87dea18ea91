"""Stand-ins for packages that SGLang imports when it is loaded and never calls for a text model on
a CPU.

A .pth file of SGLang's virtual environment imports this. A name of NAMES is an empty package only
where the real one is absent.
"""

import importlib.abc
import importlib.machinery
import sys
import types

NAMES = ("torchvision", "sgl_kernel", "soundfile", "triton")


class _Base:
    def __init__(self, *a, **k):
        pass


class _Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Mock(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            value = _Meta(name, (_Base,), {"__module__": self.__name__})
        else:
            value = Mock(f"{self.__name__}.{name}")
            value.__path__ = []
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda fn: fn


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return Mock(spec.name)

    def exec_module(self, module):
        module.__version__ = "0.0.0"
        if module.__name__ == "triton":
            module.cdiv = lambda a, b: -(a // -b)
            module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1


sys.meta_path.append(Finder())  # last: a real package wins
