# SPDX-License-Identifier: Apache-2.0
import gc
import subprocess
import sys

import pytest

from verl.utils.imports import collection_paused, deferred, importing


def test_collection_pauses_for_the_block_and_goes_on_after_an_error():
    with pytest.raises(ValueError), collection_paused():
        assert not gc.isenabled()
        raise ValueError

    assert gc.isenabled()


def test_objects_of_the_block_are_spared_from_later_collections():
    gc.unfreeze()
    before = gc.get_freeze_count()
    with collection_paused():
        made = [[number] for number in range(1000)]

    assert gc.get_freeze_count() - before >= len(made)
    gc.unfreeze()


def test_modules_are_imported_in_order_while_the_block_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    gate = tmp_path / "gate"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\nis_done = True"
    (tmp_path / "quick_one.py").write_text("")
    (tmp_path / "slow_one.py").write_text(waits)

    with importing("quick_one", "slow_one") as wait_for:
        wait_for("quick_one")
        was_done = hasattr(sys.modules.get("slow_one"), "is_done")
        gate.touch()

    assert "quick_one" in sys.modules and not was_done
    assert sys.modules["slow_one"].is_done


def test_a_module_that_fails_raises_where_it_is_imported_next(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_one.py").write_text("raise RuntimeError('half a file')")

    with importing("broken_one") as wait_for:
        wait_for("broken_one")

    with pytest.raises(RuntimeError, match="half a file"):
        deferred("broken_one", "anything")()


def test_a_deferred_function_imports_its_module_when_it_is_called(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "later_one.py").write_text("def double(number, plus=0): return 2 * number + plus")

    double = deferred("later_one", "double")

    assert "later_one" not in sys.modules
    assert double(4, plus=1) == 9


EARLY = ["verl.trainer.prepare", "verl.trainer.run.run_once", "verl.workers.warm_up"]


@pytest.mark.parametrize("module", EARLY)
def test_what_runs_before_ray_starts_imports_no_torch(module):
    check = (
        f"import sys, {module}; sys.exit(bool({{'torch', 'transformers', 'datasets'}} & {{*sys.modules}}))"
    )

    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_rows_of_files_are_read_without_torch_and_transformers():
    check = "import sys, verl.data.files; sys.exit(bool({'torch', 'transformers'} & {*sys.modules}))"

    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
