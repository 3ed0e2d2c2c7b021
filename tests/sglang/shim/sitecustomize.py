"""Stand-ins for packages that SGLang imports and a CPU test does not call.

Python loads this at its start when the folder is on PYTHONPATH, in every process of an engine.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


class Anything(types.ModuleType):
    """A module that has every name: classes for capitals, else functions that raise if called."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        where = f"{self.__name__}.{name}"
        if name == "scalar_types":
            return type(name, (), {"__getattr__": lambda self, kind: kind})()
        if name == "InterpolationMode":
            import enum

            return enum.Enum(name, "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")
        if name == "ImageReadMode":
            return types.SimpleNamespace(RGB=0)
        if name[:1].isupper():
            return type(name, (), {})

        def stub(*args, **kwargs):
            raise NotImplementedError(f"{where} is a stand-in of the tests")

        stub.__name__ = name
        return stub


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins where nothing else does."""

    PACKAGES = ("sgl_kernel", "torchvision")

    def find_spec(self, fullname, path=None, target=None):
        package = fullname.partition(".")[0]
        if package not in self.PACKAGES:
            return None
        if package == "torchvision" and self._asked_by("transformers"):
            return None  # it takes other paths where it finds them
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    @staticmethod
    def _asked_by(package: str) -> bool:
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] == package:
                return True
            frame = frame.f_back
        return False

    def create_module(self, spec):
        module = Anything(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        if module.__name__ == "torchvision":
            module.__version__ = "0.0"


sys.meta_path.append(Finder())
