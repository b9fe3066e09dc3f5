# SPDX-License-Identifier: Apache-2.0
"""Execute an untrusted program, in a process that has already dropped its privileges.

Every run imports this module: a heavy import here would slow down all of them.
"""

import builtins
import os
import sys
from _sitebuiltins import Quitter
from types import ModuleType

FILE_NAME = "solution.py"
# Exit codes that say how a program ended. A program that uses them only renames its own failure.
UNCAUGHT, OUT_OF_MEMORY, REJECTED = 121, 122, 123  # an exception, a MemoryError, an assertion of a test


def execute(job: dict, value_file: int) -> None:
    """Run a program as a script, or as a module and then write the value of a call to `value_file`."""
    values = sys.modules.get("verl.sandbox.values")  # loaded before access to its folder was dropped
    # The program must not see its launcher.
    sys.argv[:] = [FILE_NAME]
    sys.path[:] = [*sys.path, *job["import_path"]]
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    for name in ("exit", "quit"):  # the module `site`, which is not imported, would add them
        setattr(builtins, name, Quitter(name, "Ctrl-D"))
    call = job["call"]
    module = ModuleType("__main__" if call is None else "solution")
    sys.modules[module.__name__] = module
    try:
        for code in job["preludes"]:
            exec(compile(code, "prelude.py", "exec"), module.__dict__)
        exec(compile(job["source"].removeprefix("\ufeff"), FILE_NAME, "exec"), module.__dict__)
        if call is not None and values is not None:
            _make_call(module.__dict__, call, value_file, values)
    except SystemExit:
        raise
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    except _RejectedError:
        sys.exit(REJECTED)
    except BaseException as error:  # noqa: BLE001 (a program raises anything)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:  # without own frames
            trace = trace.tb_next
        error.__traceback__ = trace
        sys.__excepthook__(type(error), error, trace)
        sys.exit(UNCAUGHT)


class _RejectedError(Exception):
    """An assertion of the test did not hold."""


def _make_call(namespace: dict, call: dict[str, str], value_file: int, values: ModuleType) -> None:
    try:
        exec(compile(call["epilogue"], "test.py", "exec"), namespace)
        target = call["target"]
        if target.isidentifier() and hasattr(namespace.get("Solution"), target):
            target = f"Solution().{target}"
        value = eval(compile(target, "test.py", "eval"), namespace)
    except AssertionError as error:
        raise _RejectedError from error
    if call["arguments"] is not None:
        value = value(*values.json.loads(call["arguments"]))
    with os.fdopen(value_file, "w") as file:
        file.write(values.to_text(value, as_json=call["arguments"] is not None))
