"""Samples and oracles of every operator, a module per family; importing this registers them all."""

import importlib
import pkgutil

for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
