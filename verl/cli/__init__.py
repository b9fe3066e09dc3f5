# SPDX-License-Identifier: Apache-2.0
"""The installed commands; `python3 -m` runs none of them, and would end as if it had."""

import sys

if sys.argv[:1] == ["-m"] and any(each.startswith(f"{__name__}.") for each in sys.orig_argv):
    raise SystemExit("error: run the installed command, such as `verl-merge`, instead of its module")
