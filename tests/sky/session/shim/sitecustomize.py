"""Loaded by every Python process of the SkyPilot API server that the session starts (by PYTHONPATH), and by no other.

SkyPilot's controller asks two public addresses whether there is a network before each look at a job, and without one a
job that ended stays RUNNING. Here the server itself is asked. One controller process is enough for a few jobs, and
looking every eight seconds finds a lost island sooner than every fifteen (each look takes seconds of
CPU). Nothing else of SkyPilot is changed.
"""

import importlib.abc
import importlib.util
import os
import sys

CHANGES = {
    "sky.backends.backend_utils": {"_TEST_IP_LIST": [os.environ.get("SPRAWL_TEST_SKY_HEALTH", "")]},
    "sky.jobs.utils": {"JOB_STATUS_CHECK_GAP_SECONDS": 8},
    "sky.utils.controller_utils": {"MAX_CONTROLLERS": 1},
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules above as anybody would, and changes them once they are loaded."""

    def find_spec(self, name, path, target=None):
        if name not in CHANGES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for attribute, value in CHANGES[name].items():
                if not hasattr(module, attribute):
                    raise AttributeError(f"{name}.{attribute} is gone: this shim is for another SkyPilot")
                setattr(module, attribute, value)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
