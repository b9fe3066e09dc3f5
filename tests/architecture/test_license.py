# SPDX-License-Identifier: Apache-2.0
"""Every source file says its licence. `make license` runs this file."""

from tests.architecture.source import ROOT, source_files

HEADER = "# SPDX-License-Identifier: Apache-2.0"
PATTERNS = ("*.py", "*.sh", "*.bash", "Makefile", "Dockerfile")


def test_every_source_file_starts_with_the_licence():
    missing = []
    for pattern in PATTERNS:
        for path in source_files(ROOT, pattern):
            lines = [line for line in path.read_text().splitlines()[:2] if not line.startswith("#!")]
            if lines and lines[0] != HEADER:
                missing.append(str(path.relative_to(ROOT)))
    assert not missing, f"first line must be `{HEADER}`:\n" + "\n".join(missing)


def test_the_licence_is_there():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
